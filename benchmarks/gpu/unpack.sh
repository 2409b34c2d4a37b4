#!/usr/bin/env bash
# unpack.sh PARTS_DIR SITE_DIR: checks the bundle's parts and unpacks them into SITE_DIR.
#
# Needs Python 3.12 and no network. Run again it does nothing, or takes a newer bundle.
#   PYTHON=...   which Python; default: python3, the one that has torch
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/unpack.py" "$@"
