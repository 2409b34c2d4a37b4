#!/usr/bin/env bash
# What run.sh does for the package with the CUDA engine in the booted root, as root: installs the
# package DEB, starts the service on simulated GPUs, removes and purges. Ends with 1 at the first
# fault. The machine needs no GPU, so nothing here runs an engine.
set -euo pipefail
cd /src
. tests/boot/common.sh
readonly DEB=/opt/gpupool.deb

step "the package"
# shellcheck source=/dev/null
(. /etc/os-release && echo "$PRETTY_NAME, $(python3 --version)")
ls -lL "$DEB"
dpkg-deb -f "$DEB" Version Depends Recommends Installed-Size

step "install"
dpkg --purge gpupool 2>/dev/null || true
began=$(now_ms)
dpkg -i "$DEB"
echo "installed after $(($(now_ms) - began)) ms"
dpkg -V gpupool
id gpupool
systemd-analyze verify gpupoold.service gpupoold.socket gpupoold-admin.socket gpupoold-nvidia.service gpupool-fleet.service
man -w gpupool gpupool-add-model gpupoold
changeable=$(find /usr/lib/gpupool ! -type l \( ! -user root -o -perm /022 \) -print -quit)
[[ -z $changeable ]] || fail "others than root may change $changeable"
/usr/lib/gpupool/bin/python -c 'import torch, vllm, importlib.metadata as m
print("torch", torch.__version__, "vllm", m.version("vllm"), "CUDA", torch.version.cuda)'

step "doctor, without a GPU"
gpupool doctor || true

step "the service on simulated GPUs"
printf 'devices = ["sim:2xA10"]\n[simulated_host]\nmemory = "64GB"\n' >/etc/gpupool/gpupool.toml
systemctl restart gpupoold
await_ready
gpupool make-dummy-models /var/lib/gpupool/models --shape Qwen2.5-7B
chown -R gpupool: /var/lib/gpupool/models
gpupool add-model one --source /var/lib/gpupool/models/dummy-weights-qwen2.5-7b --ttft 10s --tbt 100ms
gpupool add-model tiny --source /var/lib/gpupool/models/dummy-weights-qwen2.5-7b
gpupool ps
answer=$(ask)
[[ $answer && $answer != *error* ]] || fail "no answer: $answer"
systemctl restart gpupoold
await_ready
[[ $(gpupool list) == *tiny* ]] || fail "the registry is gone: $(gpupool list)"
ask >/dev/null

step "remove and purge"
dpkg --remove gpupool
[[ ! -e /usr/lib/gpupool && ! -e /usr/bin/gpupool && -e /var/lib/gpupool/gpupool.db ]] || fail "remove"
pgrep -u gpupool -a && fail "processes are left"
dpkg --purge gpupool
[[ ! -e /etc/gpupool && ! -e /var/lib/gpupool ]] || fail "purge left $(ls -d /etc/gpupool /var/lib/gpupool 2>&1)"
step "done"
