#!/usr/bin/env bash
# Makes .venv from the lock in requirements/ and installs the project into it, editable.
#
#   PYTHON=/path/to/python3.12   which Python (3.11 or 3.12); default: the first that works
#   GPUPOOL_DEVICE=cpu|cuda      which lock; default: cuda if there is an NVIDIA GPU
#
# A finished environment is stamped with what it was made from, so that a second run does
# nothing and a run after an interruption starts afresh. pip's output is in build/venv.log.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv LOG=build/venv.log
readonly LOCK_STAMP=$VENV/.gpupool-lock PROJECT_STAMP=$VENV/.gpupool-project
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# The CUDA version of requirements/cuda.txt, and the first driver for that version.
readonly CUDA_MAJOR=13 LEAST_DRIVER=580
# Measured sizes in GB: the wheels, of which pip keeps a copy in $TMPDIR, and the environment.
readonly -A WHEELS_GB=([cpu]=1 [cuda]=4) VENV_GB=([cpu]=4 [cuda]=10)
# Their CUDA builds break vLLM's CPU build at import; see requirements/cpu.txt.
readonly UNWANTED_ON_CPU=(torchaudio torchcodec)

say() { printf 'venv: %s\n' "$*"; }

die() {
    printf 'venv: error: %s\n' "$1" >&2
    shift
    if (($#)); then printf '      %s\n' "$@" >&2; fi
    exit 1
}

# Runs a command with its output in the log only.
logged() {
    printf '\n$ %s\n' "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1
}

die_with_log() {
    printf '%s\n' "---- end of $LOG ----" >&2
    tail -n 15 "$LOG" >&2
    printf '%s\n' "----" >&2
    die "$@"
}

choose_device() {
    case "${GPUPOOL_DEVICE:-auto}" in
        cpu | cuda) echo "$GPUPOOL_DEVICE" ;;
        auto) if has_nvidia_gpu; then echo cuda; else echo cpu; fi ;;
        *) die "GPUPOOL_DEVICE is '$GPUPOOL_DEVICE'" "use cpu or cuda, or leave it out" ;;
    esac
}

has_nvidia_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null
}

# Prints the first usable Python; a name on PATH may be a shim that does not run.
choose_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON does not run as Python 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 found" \
        "install one (Debian, Ubuntu: apt install python3.11 python3.11-venv)" \
        "or name one: make venv PYTHON=/path/to/python3.12"
}

is_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' 2>/dev/null
}

hash_of() { sha256sum "$@" | sha256sum | cut -d ' ' -f 1; }

# With the folder's name, because an environment does not survive being moved.
lock_stamp() { echo "$(hash_of "$1") PYTHON=${PYTHON:-} $PWD"; }

# An editable install lists the packages it found: a new one needs a new install.
project_stamp() { echo "$(hash_of pyproject.toml)" gpupoold/ {cli,tui,state}/gpupool*/; }

holds() { [[ -f $1 && $(<"$1") == "$2" ]]; }

make_environment() {
    local lock=$1 python
    python=$(choose_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module" "Debian, Ubuntu: apt install python3-venv (or python3.11-venv)"
    if [[ $lock == */cpu.txt ]]; then check_numa "$python"; else check_cuda "$python"; fi
    check_disk "$(basename "$lock" .txt)"
    [[ ! -e $VENV ]] || say "$VENV is not finished or out of date: making it anew"
    rm -rf "$VENV"
    say "making $VENV with $("$python" --version), $(basename "$lock") (log: $LOG)"
    logged "$python" -m venv "$VENV" || die_with_log "$python -m venv failed"
    install_torch "$lock"
    say "installing $(grep -c '^[a-z]' "$lock") packages: follow with tail -f $LOG"
    pip_install -r "$lock" || die_with_log "pip could not install $lock" \
        "check the network and the free disk space, then run make venv again"
}

# vLLM's CPU build loads it at its first step, and says then only that something is missing.
check_numa() {
    "$1" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        die "libnuma.so.1 is missing, which vLLM's CPU build needs" "Debian, Ubuntu: apt install libnuma1"
}

# What an engine on a GPU would lack only when the first model is loaded.
check_cuda() {
    check_driver
    check_compilers "$1"
}

# A machine without nvidia-smi passes: the environment may be for another one.
check_driver() {
    local report driver cuda
    report=$(nvidia-smi 2>/dev/null) || return 0
    driver=$(sed -nE 's/.*Driver Version: *([0-9.]+).*/\1/p' <<<"$report" | head -n 1)
    cuda=$(sed -nE 's/.*CUDA( UMD)? Version: *([0-9.]+).*/\2/p' <<<"$report" | head -n 1)
    if [[ -z $cuda || ${cuda%%.*} -ge $CUDA_MAJOR ]]; then return 0; fi
    die "NVIDIA's driver ${driver:-here} is for CUDA up to $cuda; the engine is built for CUDA $CUDA_MAJOR" \
        "install driver $LEAST_DRIVER or newer (Ubuntu: apt install nvidia-driver-$LEAST_DRIVER-server), and restart" \
        "without a newer driver: make venv GPUPOOL_DEVICE=cpu, which serves on emulated devices only"
}

# Triton compiles a part in C, against Python's headers, at the first model; torch one in C++.
check_compilers() {
    local lacking=() version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null || lacking+=("a C compiler")
    command -v "${CXX:-g++}" >/dev/null || lacking+=("g++")
    "$1" -c 'import os, sysconfig
os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || lacking+=("Python.h of Python $version")
    ((${#lacking[@]})) || return 0
    die "kernels are compiled when a model is loaded, which needs also: $(list "${lacking[@]}")" \
        "Debian, Ubuntu: apt install gcc g++ libc6-dev python$version-dev"
}

list() {
    local text=$1
    shift
    if (($#)); then text+=$(printf ', %s' "$@"); fi
    echo "$text"
}

# Says what will be downloaded and needed, and refuses disks that cannot hold it.
check_disk() {
    local wheels=${WHEELS_GB[$1]} venv=${VENV_GB[$1]} tmp=${TMPDIR:-/tmp} disk free
    local -A need=()
    say "downloads about $wheels GB unless pip's cache has it; needs $venv GB in $PWD and $wheels GB in $tmp"
    need[$(disk_of .)]=$venv
    disk=$(disk_of "$tmp")
    need[$disk]=$((${need[$disk]:-0} + wheels))
    for disk in "${!need[@]}"; do
        free=$(($(df --output=avail -B 1000000 "$disk" | tail -n 1) / 1000))
        ((free >= need[$disk])) || die "the disk of $disk has $free GB free, ${need[$disk]} GB are needed" \
            "free some space, or use larger disks for this folder and for TMPDIR=/some/folder make venv"
    done
}

disk_of() { df --output=target "$1" | tail -n 1; }

# What the lock names, and nothing whose content is not the one it has the hash of.
pip_install() {
    logged "$VENV/bin/python" -m pip install --no-input --no-deps --require-hashes --only-binary :all: "$@"
}

# PyPI lacks the CPU build: pip's own sources are tried first (a mirror, a folder of
# wheels), then PyTorch's index, for this package alone. Its hash is that of PyTorch's wheel.
install_torch() {
    local torch only=build/torch.txt
    torch=$(grep -oE '^torch==[^ ]+\+cpu' "$1") || return 0
    sed -n '/^torch==/,/[^\\]$/p' "$1" >"$only"
    say "installing $torch"
    pip_install -r "$only" && return
    say "pip's own sources do not offer it: trying $TORCH_CPU_INDEX"
    pip_install --index-url "$TORCH_CPU_INDEX" -r "$only" && return
    die_with_log "$torch is neither in pip's configured sources nor could it be had from $TORCH_CPU_INDEX" \
        "either make that address reachable, or download the wheel for this Python elsewhere and run" \
        "PIP_FIND_LINKS=/folder/of/the/wheel make venv"
}

remove_unwanted() {
    local name
    for name in "${UNWANTED_ON_CPU[@]}"; do
        if compgen -G "$VENV/lib/python*/site-packages/$name-*.dist-info" >/dev/null; then
            say "removing $name: pip's builds of it break vLLM's CPU build at import"
            logged "$VENV/bin/python" -m pip uninstall -y "$name" || die_with_log "could not remove $name"
        fi
    done
}

# torchvision's operators are in a library that needs CUDA. Without the library the import fails,
# because it describes two operators that do not exist. Declared, they fail only when called, and
# image processors call neither.
declare_torchvision_operators() {
    local file
    for file in "$VENV"/lib/python*/site-packages/torchvision/extension.py; do
        grep -q 'gpupool' "$file" || cat >>"$file" <<'PYTHON'


# Added by gpupool's scripts/make_venv.sh.
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
PYTHON
    done
}

install_project() {
    say "installing the project, editable"
    logged "$VENV/bin/python" -m pip install --no-input --no-deps --no-build-isolation -e . ||
        die_with_log "pip could not install the project"
}

main() {
    local device lock made=no
    device=$(choose_device)
    lock=requirements/$device.txt
    unset PYTHONPATH PYTHONHOME
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    mkdir -p build
    exec 9>build/venv.lock
    if command -v flock >/dev/null; then flock 9; fi

    if ! holds "$LOCK_STAMP" "$(lock_stamp "$lock")" || ! is_supported "$VENV/bin/python"; then
        : >"$LOG"
        make_environment "$lock"
        lock_stamp "$lock" >"$LOCK_STAMP"
        made=yes
    fi
    if [[ $device == cpu ]]; then
        remove_unwanted
        declare_torchvision_operators
    fi
    if ! holds "$PROJECT_STAMP" "$(project_stamp)"; then
        install_project
        project_stamp >"$PROJECT_STAMP"
        made=yes
    fi
    if [[ $made == yes ]]; then say "ready: $VENV/bin/gpupool"; else say "$VENV is up to date"; fi
}

main
