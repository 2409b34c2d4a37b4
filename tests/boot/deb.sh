#!/usr/bin/env bash
# What run.sh does for packages in the booted root, as root: builds packages of three versions,
# installs, upgrades, downgrades, removes and purges. Ends with 1 at the first fault.
set -euo pipefail
cd /src
. tests/boot/common.sh
readonly DATABASE=/var/lib/gpupool/gpupool.db

# Builds a package of the sources in a folder; prints its path.
build() { (cd "$1" && VENV=/src/.venv DIST=/tmp/packages OUTSIDE=allow scripts/make_deb.sh | sed -n 's/^deb: //p'); }

# Copies the sources to a folder, with another version.
copy_as() {
    rm -rf "$1"
    cp -a /src "$1"
    sed -i "s/^version = .*/version = \"$2\"/" "$1/pyproject.toml"
    sed -i "s/^__version__ = .*/__version__ = \"$2\"/" "$1/gpupoold/__init__.py"
}
facts() {
    gpupool list
    gpupool key ls | awk '{print $1, $2}'
}
is_version() {
    [[ $(gpupool version | awk '$1 == "gpupoold" {print $2}') == "$1" ]] ||
        fail "not version $1: $(gpupool version)"
}

step "build"
dpkg --purge gpupool 2>/dev/null || true
rm -rf /tmp/packages
make_environment
copy_as /tmp/later 0.1.1
copy_as /tmp/newer 0.2.0
python3 - <<'PYTHON'
import re
from pathlib import Path

path = Path("/tmp/newer/state/gpupool_state/migrations.py")
text = path.read_text()
newest = max(map(int, re.findall(r'SchemaMigration\((\d+), "', text.split("BATCH_MIGRATIONS")[0])))
step = f'SchemaMigration({newest + 1}, "notes", ("CREATE TABLE notes (text TEXT)",))'
path.write_text(f"{text}\n\nMIGRATIONS = (*MIGRATIONS, {step})\n")
Path("/tmp/newest").write_text(str(newest))
PYTHON
schema=$(cat /tmp/newest)
first=$(build /src)
later=/tmp/packages/$(basename "$(build /tmp/later)")
newer=/tmp/packages/$(basename "$(build /tmp/newer)")
ls -l /tmp/packages
dpkg-deb -I "$first"

step "install"
began=$(now_ms)
dpkg -i "$first"
echo "installed after $(($(now_ms) - began)) ms"
dpkg -V gpupool
id gpupool
for unit in gpupoold.service gpupoold.socket gpupoold-admin.socket; do
    echo "$unit: $(systemctl is-enabled $unit), $(systemctl is-active $unit)"
    [[ $(systemctl is-enabled $unit) == enabled && $(systemctl is-active $unit) == active ]] || fail "$unit"
done
systemd-analyze verify gpupoold.service gpupoold.socket gpupoold-admin.socket
man -w gpupool gpupool-add-model gpupool-role-set gpupoold
[[ $(dpkg-query -W -f '${Conffiles}' gpupool) == *'/etc/gpupool/gpupool.toml '* ]] || fail "no conffile"
changeable=$(find /usr/lib/gpupool ! -type l \( ! -user root -o -perm /022 \) -print -quit)
[[ -z $changeable ]] || fail "others than root may change $changeable"

step "use"
write_config
systemctl restart gpupoold
add_tiny
gpupool key add ada --model tiny >/tmp/key
ask >/dev/null
sleep 2
gpupool history tiny --since 1h
before=$(facts)
echo "$before"

step "live requests at a restart"
python3 tests/boot/restart_client.py tiny systemctl restart gpupoold | tee /tmp/restart
[[ $(grep -c 'stream: .*, complete' /tmp/restart) == 5 ]] || fail "a stream was cut within limits.stop_grace"
! grep -E 'Refused' /tmp/restart || fail "a connection was refused"

step "the same with streams that are longer than limits.stop_grace"
printf '[limits]\nstop_grace = "1s"\n' >>/etc/gpupool/gpupool.toml
systemctl restart gpupoold
await_answer "$(now_ms)"
python3 tests/boot/restart_client.py tiny systemctl restart gpupoold | tee /tmp/restart
! grep -E 'Refused|closed without' /tmp/restart || fail "a connection was refused or cut"
grep -q 'error event: the server is stopping' /tmp/restart || fail "no stream was too long"
write_config

step "upgrade, with the configuration that was changed"
python3 tests/boot/restart_client.py tiny dpkg -i "$later" | tee /tmp/restart
! grep -E 'Refused' /tmp/restart || fail "a connection was refused"
is_version 0.1.1
await_answer "$(now_ms)"
[[ $(facts) == "$before" ]] || fail "not as before: $(facts)"
grep -q 256MiB /etc/gpupool/gpupool.toml || fail "the configuration was replaced"

step "downgrade with the same schema"
dpkg -i "$first"
is_version 0.1.0
await_answer "$(now_ms)"
[[ $(facts) == "$before" ]] || fail "not as before: $(facts)"

step "upgrade with a newer schema"
dpkg -i "$newer"
is_version 0.2.0
await_answer "$(now_ms)"
[[ $(facts) == "$before" ]] || fail "not as before: $(facts)"
ls -l "$DATABASE"*
[[ -s $DATABASE.bak-$schema ]] || fail "no backup"

step "downgrade below the schema"
dpkg -i "$first"
sleep 8
systemctl --no-pager status gpupoold || true
[[ $(systemctl is-active gpupoold) == failed ]] || fail "not refused"
[[ $(show NRestarts) == 0 && $(show ExecMainStatus) == 5 ]] || fail "restarted in vain"
journalctl -u gpupoold --no-pager -o cat -n 12 | tee /tmp/refusal
grep -q "schema version $((schema + 1)).*0.2.0.*0.1.0.*up to $schema" /tmp/refusal || fail "which versions?"
grep -q "gpupool.db.bak-$schema" /tmp/refusal || fail "which backup?"
(cd /var/lib/gpupool && mv gpupool.db gpupool.db.new && rm -f gpupool.db-wal gpupool.db-shm &&
    cp -p "gpupool.db.bak-$schema" gpupool.db)
systemctl reset-failed gpupoold.service gpupoold.socket gpupoold-admin.socket
systemctl start gpupoold.socket gpupoold-admin.socket gpupoold
await_answer "$(now_ms)"
[[ $(facts) == "$before" ]] || fail "not as before: $(facts)"
gpupool history tiny --since 1h

step "remove, and install again"
dpkg --remove gpupool
[[ ! -e /usr/lib/gpupool && ! -e /usr/bin/gpupool && ! -e /usr/lib/systemd/system/gpupoold.service ]] ||
    fail "files are left"
[[ -e $DATABASE && -e /etc/gpupool/gpupool.toml ]] || fail "state or configuration is gone"
pgrep -u gpupool -a && fail "processes are left"
[[ $(systemctl is-active gpupoold.socket) != active ]] || fail "the socket is open"
dpkg -i "$first"
await_answer "$(now_ms)"
[[ $(facts) == "$before" ]] || fail "not as before: $(facts)"

step "purge"
touch /etc/gpupool/environment
dpkg --purge gpupool
pgrep -u gpupool -a && fail "processes are left"
left=$(find / -xdev \( -path /proc -o -path /src -o -path /tmp -o -path /opt \) -prune -o -name '*gpupool*' -print)
echo "left: $left"
[[ -z $left ]] || fail "files are left"
id gpupool
systemctl --no-pager list-units --all 'gpupool*'
echo
echo "all as it should be"
