"""Which variables of vLLM's get from the daemon's environment into workers and frontends."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest

from gpupoold.engine_versions import KNOWN_VARIABLES, drop_unlisted, set_platform


def test_only_listed_variables_are_left() -> None:
    environment = {
        "PATH": "/bin",
        "VLLM_API_KEY": "secret",
        "VLLM_CACHE_ROOT": "/c",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "1",
        "VLLM_RINGBUFFER_WARNING_INTERVAL": "5",
    }
    dropped = drop_unlisted(environment, ["VLLM_RINGBUFFER_WARNING_INTERVAL"])
    assert dropped == ["VLLM_API_KEY", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE"]
    assert sorted(environment) == ["PATH", "VLLM_CACHE_ROOT", "VLLM_RINGBUFFER_WARNING_INTERVAL"]


def test_vllm_has_what_is_known() -> None:
    """The file alone is run: an import of vLLM takes seconds."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    found = run_path(str(Path(vllm.origin).with_name("envs.py")))
    assert found["environment_variables"].keys() >= KNOWN_VARIABLES


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [({"sim"}, {"VLLM_TARGET_DEVICE": "cpu"}), ({"sim", "cuda"}, {}), ({"emulated"}, {})],
)
def test_only_simulated_devices_need_no_gpu(kinds: set[str], expected: dict[str, str]) -> None:
    environment: dict[str, str] = {}
    set_platform(environment, kinds)
    assert environment == expected
