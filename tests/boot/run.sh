#!/usr/bin/env bash
# Boots a Debian or Ubuntu root with systemd as process 1, installs gpupool there and tries the service
# for real. Needs root, mmdebstrap and systemd-nspawn; takes some minutes, so it is not a part of
# `make test`.
#
#   tests/boot/run.sh            sockets, reload, kill -9, watchdog, stop, journal, uninstall
#                                (inside.sh)
#   tests/boot/run.sh deb.sh     packages: install, upgrade, downgrade, remove, purge
#   tests/boot/run.sh cuda_deb.sh   the package with the CUDA engine, on a machine without a GPU
#
#   ROOT=build/boot-root         the root; made when it is not there
#   SUITE=bookworm               what is made: noble for Ubuntu 24.04
#   MIRROR=...                   where from, as mmdebstrap takes it; KEYRING=file for its keys
#   PACKAGES=folder              a site-packages folder to use there, read-only, instead of
#                                downloading all packages again; of the same version of Python
#   DEB=file                     the package for cuda_deb.sh, made by `make deb` in such a root
#   MMDEBSTRAP=..., NSPAWN=...   the two programs
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly ROOT=${ROOT:-$PWD/build/boot-root} SOURCE=$PWD
readonly INSIDE=${1:-inside.sh}
readonly SUITE=${SUITE:-bookworm} MIRROR=${MIRROR:-} KEYRING=${KEYRING:-}
readonly MMDEBSTRAP=${MMDEBSTRAP:-mmdebstrap} NSPAWN=${NSPAWN:-systemd-nspawn}
readonly INCLUDE=libnuma1,systemd,systemd-sysv,dbus,python3,python3-venv,make,gcc,g++,libc6-dev,python3-dev,git,curl,ca-certificates,procps,man-db

if [[ ! -e $ROOT/etc/os-release ]]; then
    "$MMDEBSTRAP" --variant=minbase --include="$INCLUDE" ${KEYRING:+"--keyring=$KEYRING"} \
        "$SUITE" "$ROOT" ${MIRROR:+"$MIRROR"}
fi
rm -rf "$ROOT"/{src,result,log} "$ROOT"/{var/lib,var/cache,etc,usr/local/lib}/gpupool \
    "$ROOT/var/log/journal"
find "$ROOT/etc/systemd" -name 'gpupool*' -delete
git clone --quiet "$SOURCE" "$ROOT/src"
cat >"$ROOT/etc/systemd/system/boot-test.service" <<UNIT
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=HOME=/root
ExecStart=/bin/bash -c '/src/tests/boot/$INSIDE >/log 2>&1; echo \$? >/result'
ExecStopPost=/bin/systemctl --no-block poweroff
[Install]
WantedBy=default.target
UNIT
mkdir -p "$ROOT/etc/systemd/system/default.target.wants"
ln -sf ../boot-test.service "$ROOT/etc/systemd/system/default.target.wants/boot-test.service"
options=()
# A network of its own, as long as nothing is downloaded: the ports of the host may be in use.
if [[ -n ${PACKAGES:-} ]]; then options=(--private-network "--bind-ro=$PACKAGES:/opt/packages"); fi
if [[ -n ${DEB:-} ]]; then options=(--private-network "--bind-ro=$(realpath "$DEB"):/opt/gpupool.deb"); fi
"$NSPAWN" --quiet --directory="$ROOT" --register=no --keep-unit "${options[@]}" --boot \
    >"$ROOT/console" 2>&1 || true
cat "$ROOT/log"
exit "$(cat "$ROOT/result")"
