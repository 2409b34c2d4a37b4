#!/usr/bin/env bash
# What run.sh does in the booted root, as root: prints what it saw, ends with 1 at the first
# thing that is not as it should be.
set -euo pipefail
cd /src

. tests/boot/common.sh

step "install"
make_environment
make install
id gpupool
changeable=$(find /usr/local/lib/gpupool ! -type l \( ! -user root -o -perm /022 \) -print -quit)
[[ -z $changeable ]] || fail "others than root may change $changeable"
systemd-analyze verify gpupoold.service gpupoold.socket gpupoold-admin.socket gpupoold-nvidia.service gpupool-fleet.service
systemd-analyze security --no-pager gpupoold.service | tail -n 1

# The program of NVIDIA's driver that loads modules and creates device files.
cat >/usr/local/sbin/nvidia-modprobe <<'PROGRAM'
#!/bin/sh
echo "$@" >>/run/nvidia-modprobe
[ -e /dev/gpupool-test ] || mknod /dev/gpupool-test c 10 229
PROGRAM
chmod 755 /usr/local/sbin/nvidia-modprobe

step "start"
write_config
began=$(now_ms)
systemctl enable --now gpupoold
echo "active after $(($(now_ms) - began)) ms"
systemctl --no-pager -l status gpupoold.service gpupoold.socket gpupoold-admin.socket || fail "not active"
ls -ld /run/gpupool /run/gpupool/admin.sock /var/lib/gpupool
[[ $(stat -c %a /var/lib/gpupool) == 700 ]] || fail "others may look into the state folder"
# A container may not be allowed to have a lower score than its own.
echo "OOM score: $(show OOMScoreAdjust) wanted, $(cat "/proc/$(show MainPID)/oom_score_adj") had"
[[ $(show OOMScoreAdjust) == -500 ]] || fail "the daemon's OOM score"

step "device files"
[[ $(paste -sd ' ' /run/nvidia-modprobe) == "-c=255 -u -c=0 -c=1" ]] || fail "$(cat /run/nvidia-modprobe)"
[[ -c /dev/gpupool-test ]] || fail "no device file: $(journalctl --no-pager -u gpupoold-nvidia -o cat)"
echo "in a unit with DevicePolicy=closed:" \
    "$(systemd-run --quiet --wait --pipe -p DevicePolicy=closed mknod /dev/gpupool-closed c 10 229 2>&1 || true)"

step "use"
await_ready
echo "ready after $(($(now_ms) - began)) ms"
add_tiny
systemctl --no-pager status gpupoold | grep -E 'Status|FD Store|Memory|Tasks'
if setpriv --reuid=nobody --regid=nogroup --clear-groups gpupool status; then fail "nobody may use it"; fi
setpriv --reuid=nobody --regid=nogroup --groups=gpupool gpupool status >/dev/null || fail "a member may not"

find /var/lib/gpupool /var/cache/gpupool -maxdepth 1
for name in .triton .nv .cache; do
    [[ ! -e /var/lib/gpupool/$name ]] || fail "kernels are cached in the state folder: $name"
done

step "the README's tour: watch, ask why, change"
gpupool add-model coder --source /var/lib/gpupool/models/tiny-qwen2 --ttft 10s --tbt 100ms
gpupool run coder "Why is the sky blue?" --max-tokens 8
gpupool ps
gpupool top -1
for _ in 1 2 3; do ask >/dev/null & done
gpupool why tiny
wait
gpupool history tiny --since 1h
gpupool switches
gpupool events
gpupool doctor || [[ $? == 1 ]] || fail "the doctor has no opinion"
gpupool set coder --tbt 50ms
gpupool config check
(echo '[limits]'; echo 'drain_timeout = "42s"'; cat /etc/gpupool/gpupool.toml) >/tmp/other.toml
gpupool config diff /tmp/other.toml
gpupool key add ada --model coder >/tmp/key
gpupool key ls
curl -sS --max-time 20 -H "Authorization: Bearer $(cat /tmp/key)" http://127.0.0.1:8000/v1/models |
    python3 -c 'import json, sys; print([one["id"] for one in json.load(sys.stdin)["data"]])'
gpupool key rm ada
curl -sS --max-time 20 http://127.0.0.1:8000/metrics | grep -E '^gpupool_(tokens|requests)' | head -n 4
gpupool rm coder --drain

step "journal"
journalctl -u gpupoold -o json --no-pager GPUPOOL_EVENT=model_added | python3 -c '
import json, sys
record = json.loads(sys.stdin.readline())
wanted = ("MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "CODE_FILE", "CODE_LINE", "CODE_FUNC",
          "GPUPOOL_EVENT", "GPUPOOL_MODEL", "_SYSTEMD_UNIT")
for name in wanted:
    print(f"{name}={record[name]}")'
journalctl -u gpupoold --no-pager -o cat | grep -c '^' || fail "nothing in the journal"

step "reload"
pid=$(show MainPID)
systemctl reload gpupoold
sleep 2
[[ $(show MainPID) == "$pid" && $(show ActiveState) == active ]] || fail "not the same process"
journalctl -u gpupoold --no-pager -n 3 -o cat
cp /etc/gpupool/gpupool.toml /tmp/right.toml
echo 'wrong = 1' >>/etc/gpupool/gpupool.toml
systemctl reload gpupoold || true
sleep 2
[[ $(show MainPID) == "$pid" && $(show ActiveState) == active ]] || fail "a wrong file ended it"
cp /tmp/right.toml /etc/gpupool/gpupool.toml
journalctl -u gpupoold --no-pager -n 2 -o cat

step "kill -9"
echo "kept descriptors: $(show NFileDescriptorStore)"
(($(show NFileDescriptorStore) >= 2)) || fail "the image is not kept"
began=$(now_ms)
kill -9 "$pid"
curl -sS -o /dev/null -w 'a request meanwhile: HTTP %{http_code} after %{time_total} s\n' \
    --max-time 120 http://127.0.0.1:8000/v1/models || fail "refused"
await_answer "$began"
[[ $(show MainPID) != "$pid" ]] || fail "the same process"
journalctl -u gpupoold --no-pager -o cat | grep 'outlived' || fail "the image was not taken back"
gpupool list

step "watchdog"
pid=$(show MainPID)
began=$(now_ms)
kill -STOP "$pid"
while [[ $(show MainPID) == "$pid" ]]; do
    (($(now_ms) - began < 90000)) || fail "the watchdog did not bite"
    sleep 0.5
done
echo "ended $(($(now_ms) - began)) ms after it was stopped"
journalctl -u gpupoold --no-pager -o cat | grep -i watchdog | tail -n 2
await_answer "$began"
echo "restarts: $(show NRestarts)"

step "restart keeps the cache"
kept=$(journalctl -u gpupoold --no-pager -o cat | grep -c outlived)
began=$(now_ms)
systemctl restart gpupoold
await_answer "$began"
[[ $(journalctl -u gpupoold --no-pager -o cat | grep -c outlived) -gt $kept ]] || fail "cold"

step "stop"
began=$(now_ms)
systemctl stop gpupoold
echo "stopped after $(($(now_ms) - began)) ms, $(show Result), status $(show ExecMainStatus)"
[[ $(show Result) == success ]] || fail "not stopped in order"
(($(now_ms) - began < 50000)) || fail "too slow"
echo "kept descriptors: $(show NFileDescriptorStore)"
pgrep -u gpupool -a && fail "processes are left"
[[ -S /run/gpupool/admin.sock ]] || fail "the admin socket went with the service"

step "a fault at the start that lasts"
mount -t tmpfs -o size=64k,mode=700 tmpfs /var/lib/gpupool
chown gpupool: /var/lib/gpupool
dd if=/dev/zero of=/var/lib/gpupool/ballast bs=1k count=64 2>/dev/null || true
systemctl start --no-block gpupoold
sleep 45
[[ $(show ActiveState) != failed ]] || fail "it was given up after $(show NRestarts) restarts"
echo "$(show NRestarts) restarts in 45 s"
umount -l /var/lib/gpupool
began=$(now_ms)
await_answer "$began"
systemctl stop gpupoold

step "an engine for GPUs, and no driver yet"
cp /etc/gpupool/gpupool.toml /tmp/right.toml
sed -n '/^\[memory\]/,$p' /tmp/right.toml >/etc/gpupool/gpupool.toml
engine=$(echo /usr/local/lib/gpupool/lib/python3*/site-packages)/vllm-0.32.0.dist-info
mkdir "$engine"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n' >"$engine/METADATA"
systemctl start --no-block gpupoold
sleep 15
[[ $(show ActiveState) != failed && $(show NRestarts) -ge 1 ]] || fail "no further start"
journalctl -u gpupoold --no-pager -o cat | grep 'no NVIDIA GPU was found' | tail -n 1 || fail "no reason"
timeout 60 gpupool doctor >/tmp/said || true
grep -A 1 'fault: gpu:' /tmp/said || fail "the doctor does not see it"
rm -r "$engine"
cp /tmp/right.toml /etc/gpupool/gpupool.toml
began=$(now_ms)
await_answer "$began"

step "a data disk, and a home that is closed"
mkdir -p /data /home/ada/model
mount -t tmpfs tmpfs /data
chmod 750 /home/ada
printf '[paths]\ndownload_dir = "/data/models"\n' >>/etc/gpupool/gpupool.toml
systemctl restart gpupoold
gpupool doctor >/tmp/said || true
grep -A 1 '^fault: folder download_dir' /tmp/said || fail "the doctor does not see it"
grep -q 'ReadWritePaths=/data/models' /tmp/said || fail "no remedy"
mkdir -p /data/models && chown gpupool: /data/models
mkdir -p /etc/systemd/system/gpupoold.service.d
printf '[Service]\nReadWritePaths=/data/models\n' >/etc/systemd/system/gpupoold.service.d/override.conf
systemctl daemon-reload
systemctl restart gpupoold
if gpupool doctor | grep -A 1 'fault: folder'; then fail "the remedy did not help"; fi
setpriv --reuid=gpupool --regid=gpupool --clear-groups env HOME=/var/lib/gpupool gpupool doctor |
    grep -E '^folder|^open files' || fail "the daemon's user sees no folders"
gpupool add-model ada --source /home/ada/model 2>&1 | tee /tmp/said || true
grep -q 'setfacl -m u:gpupool:x /home/ada' /tmp/said || fail "no remedy"
rm -r /etc/systemd/system/gpupoold.service.d
cp /tmp/right.toml /etc/gpupool/gpupool.toml
systemctl daemon-reload
systemctl stop gpupoold

step "socket activation"
began=$(now_ms)
gpupool status || true # its exit status says that no model is served yet
echo "answered after $(($(now_ms) - began)) ms"
[[ $(show ActiveState) == active ]] || fail "not started by its socket"

step "upgrade and uninstall"
make install
systemctl restart gpupoold
await_answer "$(now_ms)"
make uninstall
[[ ! -e /usr/local/bin/gpupool && -e /var/lib/gpupool && -e /etc/gpupool/gpupool.toml ]] || fail "wrong"
find /usr/local /etc/gpupool \( -name '*gpupool*' \) -print
echo
echo "all as it should be"
