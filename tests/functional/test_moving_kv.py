"""Models of every kind of KV and state: requests that move compute no token twice."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.functional.processor import HAS_AMX
from tests.support.vllm_environment import ENVIRONMENT

pytestmark = pytest.mark.slow

_EXACT = ["--chunks", "--losses"]
# Rows: family, and the arguments of `moving_engines`. In bfloat16, prefills of different lengths
# round differently, on some processors batches too. vLLM's CPU kernels of MLA and of short
# convolutions give other tokens in batches, and after a prefill of tokens that were decoded before.
FAMILIES = [
    pytest.param("granite4", _EXACT, id="mamba2-and-full"),
    pytest.param("gemma3", _EXACT, id="sliding-and-full", marks=pytest.mark.slow),
    *(
        pytest.param(name, options, id=name, marks=pytest.mark.slow)
        for name, options in (
            ("mistral", _EXACT),
            ("mistral-window", _EXACT),
            ("gemma4", _EXACT),
            ("gpt-oss", [*_EXACT, "--room-mib", "44"]),
            ("llama4", _EXACT),
            ("deepseek-v2", ["--alone"]),
            ("deepseek-v3", ["--alone"]),
            ("mamba2", _EXACT),
            ("falcon-h1", _EXACT),
            ("lfm2", ["--alone"]),
            ("qwen3-next", ["--alone"]),
        )
    ),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_no_token_is_computed_twice(
    family: str, options: list[str], project_env: dict[str, str]
) -> None:
    if HAS_AMX and family.startswith("deepseek"):
        pytest.skip("vLLM's attention of this family refuses float32 on a processor with AMX")
    figures = moved(family, options, project_env)
    assert figures["differing"] == []
    assert figures["num_tokens_computed_again"] == 0
    assert figures["num_moves"] >= 40
    assert figures["num_kv_out_bytes"] > 0
    assert bool(figures["num_moves_without_kv"]) == ("--losses" in options)
    assert figures["num_moves_in_prefill"] > 0 or "--chunks" not in options


def moved(family: str, options: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The figures of a process with two engines of a family."""
    folder = ROOT / "build" / "families"
    make = [sys.executable, "-m", "benchmarks.families.make", str(folder), "--only", family]
    subprocess.run(make, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=120)
    dtype = json.loads((folder / family / "config.json").read_text())["dtype"]
    command = [sys.executable, "-m", "tests.functional.moving_engines", str(folder / family), dtype]
    done = subprocess.run(
        command + options,
        env=environment | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
