"""Planning with what a real daemon knows: its models, their measured steps, its history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool_cli.private_daemon import PrivateDaemon, private_daemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    api_client,
    ask,
    cli,
    device_config,
    weight_bytes,
)

NAMES = (LLAMA, QWEN2)
OUTPUT_TOKENS = {LLAMA: 12, QWEN2: 20}


@pytest.fixture(scope="module")
def served(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A daemon with two models that has answered three requests to each."""
    config = device_config(4 * max(weight_bytes(tiny_models[name]) for name in NAMES))
    with private_daemon(config, tmp_path_factory.mktemp("plan")) as daemon:
        for name in NAMES:
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        asyncio.run(_ask_both(daemon))
        yield daemon


async def _ask_both(daemon: PrivateDaemon) -> None:
    async with api_client(daemon.http_url) as api:
        for number in range(3):
            for name in NAMES:
                await ask(api, name, f"question {number}", OUTPUT_TOKENS[name])


def test_the_history_can_be_read(served: PrivateDaemon) -> None:
    with served.client() as client:
        records = list(client.requests())
        latest = list(client.requests(limit=2))
    assert [(one.model, one.num_output_tokens) for one in records] == [
        (name, OUTPUT_TOKENS[name]) for _ in range(3) for name in reversed(NAMES)
    ]
    assert latest == records[:2]
    assert records[0].arrived_at > records[-1].arrived_at
    assert all(one.num_prompt_tokens > 0 and one.finish_reason == "length" for one in records)


def test_registered_models_and_their_recorded_load(served: PrivateDaemon) -> None:
    arguments = ("--models", "registered", "--trace", "recorded", "--devices", "H800")
    done = cli(served, "plan", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert plan["fits"]
    assert plan["devices_needed"] == 1
    assert plan["requests"] == 6
    assert plan["attainment_by_run"] == [1.0]
    by_name = {model["name"]: model for model in plan["models"]}
    assert set(by_name) == set(NAMES)
    for model in by_name.values():
        assert (model["requests"], model["finished"]) == (3, 3)
        assert model["ttft_s"] == 10
        # The fits of the emulated device are not taken for those of a GPU.
        assert model["step_times"] == "scaled"
        assert model["weight_bytes"] > 0
    assert any("on CPU x" in note and "says nothing of H800" in note for note in plan["notes"])
    table = cli(served, "plan", *arguments)
    assert table.returncode == 0
    assert all(name in table.stdout for name in NAMES)


def test_registered_models_at_a_rate(served: PrivateDaemon) -> None:
    arguments = ("--models", "registered", "--rps", "0.5,1", "--devices", "2xA10")
    done = cli(served, "plan", *arguments, "--duration", "1m", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["load"].startswith("1.5 requests/s")
    # ShareGPT lengths are longer than these models can take.
    assert plan["requests_cut"] + plan["requests_refused"] > 0
