"""``gpupool bench`` as a user runs it, small: real daemons, real switches, all figures there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_streams import stream_over

TIMEOUT_S = 280
STAGES = {"evict_s", "map_s", "weights_s", "kv_s"}
VERDICT = {"limit_s", "limit_of", "ratio", "reached"}

pytestmark = pytest.mark.slow


def bench(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What the command prints with ``--json``."""
    done = subprocess.run(
        [sys.executable, "-m", "gpupool_cli.main", "bench", *arguments, "--json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_memory(project_env: dict[str, str]) -> None:
    kv_bytes = 2 << 20
    result = bench(project_env, "memory", "--size", "10MB", "--kv", str(kv_bytes), "--rounds", "2")
    assert {row["by"] for row in result["copies"]} >= {"device_copy", "copy_stream", "queue"}
    assert result["mapping"]
    swap, overlap = result["kv_swap"], result["kv_overlap"]
    assert swap["is_intact"] is True
    assert swap["samples"] == 2
    assert 2 * kv_bytes <= swap["bytes"] < 3 * kv_bytes
    assert swap["ratio"] == pytest.approx(swap["bytes_per_s"] / swap["limit_bytes_per_s"])
    assert overlap["bytes"] == swap["bytes"]
    assert overlap["steps_during"] >= 2
    assert overlap["hidden_share"] <= 1


def test_load(project_env: dict[str, str]) -> None:
    """A stream goes on while a model is added; the longest pause depends on the machine."""
    result = bench(project_env, "load", "--size", "100MB", "--rounds", "1")
    assert result["rounds"] == 1
    assert result["tokens_while_loading"] > 5
    assert result["undisturbed_p50_s"] <= result["undisturbed_pause_s"] <= result["limit_s"]
    assert result["load_alone_s"] > 0
    assert result["reached"] == (result["pause_s"] <= result["limit_s"])


def test_switch(project_env: dict[str, str]) -> None:
    rounds = 2
    result = bench(project_env, "switch", "--size", "10MB", "--rounds", str(rounds))
    modes = result["modes"]
    assert list(modes) == ["resident", "prefetched", "host_cached", "cold_from_disk"]
    for mode in ("resident", "prefetched", "host_cached"):
        for row in modes[mode].values():
            assert row.keys() >= VERDICT | {"p50_s", "p99_s", "bytes", "samples"}
            assert row["stages_p50_s"].keys() == STAGES
            assert row["ready_p50_s"] <= row["p50_s"] <= row["p99_s"]
            assert row["samples"] == 2 * rounds * (25 if mode == "resident" else 1)
        assert modes[mode].keys() == {"without_kv", "with_kv"}
    assert {row["bytes"] for m in ("resident", "prefetched") for row in modes[m].values()} == {0}
    without, with_kv = modes["host_cached"]["without_kv"], modes["host_cached"]["with_kv"]
    assert without["bytes"] == result["weight_bytes"] == result["bytes"]
    assert with_kv["bytes"] >= without["bytes"] + (2 << 20)  # 1 MiB out, 1 MiB in
    first_tokens = result["first_tokens"]
    assert [row["prompt_tokens"] for row in first_tokens] == [32, 400]
    assert all(row["prefill_p50_s"] > 0 for row in first_tokens)
    assert all("early_p50_s" not in row for row in first_tokens)  # the host's cores copy
    cold = modes["cold_from_disk"]["without_kv"]
    assert cold.keys() >= VERDICT
    assert cold["stages_p50_s"]["read_s"] > 0
    assert result["switch_p50_s"] == without["p50_s"]


def test_streams_over_four_models_lose_nothing(tiny_models: dict[str, Path]) -> None:
    result = stream_over(list(tiny_models.values()), num_switches=12, num_warm_up=1)
    assert result["switches"] >= 12
    assert result["switches_with_kv"] > 0
    assert result["tokens"] == 96 * result["answers"]
    assert (result["differing_tokens"], result["pages_leaked"]) == (0, 0)
    assert result["host_bytes_gained_by_kind"]["kv_host_bytes"] == 0
