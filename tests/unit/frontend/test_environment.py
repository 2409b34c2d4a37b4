"""The version check and the arguments, without importing vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpupoold.config.sections import BatchSettings, FrontendSettings, ServerSettings
from gpupoold.frontend.__main__ import argument_parser


def test_settings_travel_as_json() -> None:
    server = ServerSettings.model_validate(
        {"tls_cert": "/a.pem", "tls_key": "/b.pem", "wait_comments": 0.5, "max_body": 9}
    )
    batches = BatchSettings.model_validate({"keep": 60.0, "max_file_bytes": 7})
    folder = Path("/state/batches")
    sent = FrontendSettings(number=3, server=server, batches=batches, batches_folder=folder)
    given = ["--wire-fd", "3", "--listen-fd", "4", "--settings"]
    found = argument_parser().parse_args([*given, sent.model_dump_json(by_alias=True)])
    assert found.settings == sent


def test_only_the_adapter_imports_the_engine() -> None:
    script = "import gpupoold.frontend.__main__, sys; "
    script += "assert not {'vllm', 'torch'} & set(sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script], cwd=root).returncode == 0
