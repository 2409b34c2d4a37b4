#!/usr/bin/env bash
# Builds the wheel of the project in dist/, with pip and setuptools of .venv. Downloads nothing.
#
#   VENV=.venv           the environment that builds
#   DIST=dist            where the wheel goes
#
# Equal sources give equal bytes. The engine is not part of the wheel: the extras `cpu` and `cuda`
# name it (docs/packages.md).
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022

readonly VENV=${VENV:-.venv} DIST=${DIST:-dist}

if [[ ! -x $VENV/bin/python ]]; then
    printf 'wheel: error: there is no environment in %s: run `make venv`\n' "$VENV" >&2
    exit 1
fi
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
# Built from a copy: setuptools leaves files beside the sources, and packs what an earlier build
# has left there.
tar -c --exclude=__pycache__ --exclude='*.egg-info' pyproject.toml README.md LICENSE gpupoold cli \
    state tui | tar -x -C "$source"
# The times of the files in the wheel; zip files have none before 1980.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
env -u PYTHONPATH "$VENV/bin/python" -m pip wheel --quiet --no-input --no-index --no-deps \
    --no-build-isolation --disable-pip-version-check --wheel-dir "$DIST" "$source"
printf 'wheel: %s\n' "$DIST"/gpupool-*.whl
