"""The version check and the arguments, without importing vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpupoold.frontend.__main__ import parse_arguments
from gpupoold.frontend.server import FrontendSettings


def test_arguments() -> None:
    given = ["--wire-fd", "3", "--listen-fd", "4", "--log-level", "debug", "--max-body-bytes", "9"]
    given += ["--max-live-requests", "7", "--max-bytes-in-flight", "90"]
    assert parse_arguments(given) == FrontendSettings(
        wire_fd=3,
        listen_fd=4,
        log_level="debug",
        max_body_bytes=9,
        max_live_requests=7,
        max_bytes_in_flight=90,
    )


def test_only_the_adapter_imports_the_engine() -> None:
    script = "import gpupoold.frontend.__main__, sys; "
    script += "assert not {'vllm', 'torch'} & set(sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script], cwd=root).returncode == 0
