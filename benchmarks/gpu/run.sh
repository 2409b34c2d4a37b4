#!/usr/bin/env bash
# Tests and benchmarks on a GPU, within 8 minutes: benchmarks/gpu/run.sh OUT [--dry-run [cuda]]
#
# OUT gets results.json, junit.xml and logs.tar.gz. Further options: --only A,B (pieces by
# name), --no-tests, --fail-fast, --budget SECONDS. $GPUPOOL_SITE is a folder with packages that
# unpack.sh has installed; without it the environment is used as it is. $GPUPOOL_PYTHON is
# the interpreter (default: python3). The outcome of each piece is in results.json; the exit
# code is 1 when one failed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${GPUPOOL_PYTHON:-python3}
site=${GPUPOOL_SITE:-}
paths=$root:$root/cli:$root/state:$root/tui
export PYTHONPATH=${site:+$site:}$paths${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# vLLM alone, the rival, takes FlashInfer for granted; the bundle has none.
if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("flashinfer") is not None)'
then export VLLM_USE_FLASHINFER_SAMPLER=0
fi

parent=$("$python" -m benchmarks.gpu.machine)
# Short: paths of sockets below it may have 107 characters.
scratch=$(mktemp -d "$parent/gpupool.XXXXXX")
runner=
cleanup() {
    # Whatever runs dies with the runner.
    if [ -n "$runner" ] && kill -0 "$runner" 2>/dev/null; then kill -KILL "$runner"; fi
    rm -rf "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

mkdir "$scratch/t"
export TMPDIR=$scratch/t
# What is compiled for one model is there for the next of its shape, in any process.
# $GPUPOOL_BENCH_CACHE is a folder that keeps it for the next run.
cache=${GPUPOOL_BENCH_CACHE:-$scratch/cache}
export VLLM_CACHE_ROOT=$cache/vllm TRITON_CACHE_DIR=$cache/triton
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor XDG_CACHE_HOME=$cache

"$python" -m benchmarks.gpu.runner "$@" --scratch "$scratch" &
runner=$!
wait "$runner"
