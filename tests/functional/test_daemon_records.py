"""What a daemon has recorded: its history, to plan with, and its core's log, to replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.replay.log_file import open_log, replay_file, write
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Send, StartTurn
from gpupoold.sim.policies import make_policy
from tests.functional.daemon_tools import (
    LOAD_OPTIONS,
    MODELS,
    api_client,
    ask,
    check,
    cli,
    emulated_config,
    open_stream,
    private_daemon,
    ps,
    until,
    weight_bytes,
)

NAMES = MODELS[:3]
OUTPUT_TOKENS = dict(zip(NAMES, (12, 16, 20), strict=True))
_CONFIG = """
[scheduling]
quota_max = "100ms"
"""


@pytest.fixture(scope="module")
def served(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A daemon with three models that has answered three requests to each."""
    device_bytes = int(1.6 * max(weight_bytes(tiny_models[name]) for name in NAMES))
    folder = tmp_path_factory.mktemp("records")
    with private_daemon(emulated_config(device_bytes) + _CONFIG, folder) as daemon:
        for name in NAMES:
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        asyncio.run(_ask_all(daemon))
        yield daemon


async def _ask_all(daemon: PrivateDaemon) -> None:
    async with api_client(daemon.http_url) as api:
        for number in range(3):
            for name in NAMES:
                await ask(api, name, f"question {number}", OUTPUT_TOKENS[name])


class TestPlan:
    """Before the load below: with what is known of nine requests."""

    def test_the_history_can_be_read(self, served: PrivateDaemon) -> None:
        with served.client() as client:
            records = list(client.requests())
            latest = list(client.requests(limit=2))
        assert [(one.model, one.num_output_tokens) for one in records] == [
            (name, OUTPUT_TOKENS[name]) for _ in range(3) for name in reversed(NAMES)
        ]
        assert latest == records[:2]
        assert records[0].arrived_at > records[-1].arrived_at
        assert all(one.num_prompt_tokens > 0 and one.finish_reason == "length" for one in records)

    def test_registered_models_and_their_recorded_load(self, served: PrivateDaemon) -> None:
        arguments = ("--models", "registered", "--trace", "recorded", "--devices", "H800")
        done = cli(served, "plan", *arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        plan = json.loads(done.stdout)
        assert plan["fits"]
        assert plan["devices_needed"] == 1
        assert plan["requests"] == 9
        assert plan["attainment_by_run"] == [1.0]
        by_name = {model["name"]: model for model in plan["models"]}
        assert set(by_name) == set(NAMES)
        for model in by_name.values():
            assert (model["requests"], model["finished"]) == (3, 3)
            assert model["ttft_s"] == 10
            # The fits of the emulated device are not taken for those of a GPU.
            assert model["step_times"] == "scaled"
            assert model["weight_bytes"] > 0
        assert any("on CPU x" in note and "do not apply to H800" in note for note in plan["notes"])
        table = cli(served, "plan", *arguments)
        assert table.returncode == 0
        assert all(name in table.stdout for name in NAMES)

    def test_registered_models_at_a_rate(self, served: PrivateDaemon) -> None:
        arguments = ("--models", "registered", "--rps", "0.5,0.5,1", "--devices", "2xA10")
        done = cli(served, "plan", *arguments, "--duration", "1m", "--json")
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert plan["load"].startswith("2 requests/s")
        # ShareGPT lengths are longer than these models can take.
        assert plan["requests_cut"] + plan["requests_refused"] > 0


@pytest.fixture(scope="module")
def log(served: PrivateDaemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the daemon's core was told and did, in the end while streams shared a device."""
    asyncio.run(_load(served))
    until(lambda: not ps(served).requests)
    check(served)
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    with served.client() as client:
        write(path, (line + b"\n" for line in client.event_log()))
    return path


async def _load(daemon: PrivateDaemon) -> None:
    """Answers that take turns, and one whose client leaves."""
    async with api_client(daemon.http_url) as api:
        leaving = await open_stream(api, NAMES[0], "never read to its end", 200)
        jobs = [ask(api, NAMES[n % 3], f"prompt {n}", 48) for n in range(12)]
        await asyncio.gather(*jobs)
        await leaving.close()


class TestReplay:
    def test_the_simulator_s_core_takes_the_same_actions(self, log: Path) -> None:
        assert replay_file(log).difference is None

    def test_the_log_has_what_happened(self, log: Path) -> None:
        with open_log(log) as file:
            assert file.header.policy == "gpupool"
            actions = [action for _, one in file.entries for action in one.actions]
        sent = [action.request_id for action in actions if isinstance(action, Send)]
        assert len(sent) == len(set(sent)) == 9 + 13
        turns = {
            a.turn.turn_id: a.turn.model for a in actions if isinstance(a, StartTurn) and a.turn
        }
        assert set(turns.values()) == set(NAMES)
        assert len(turns) > len(NAMES)  # somebody was paused and went on

    def test_another_policy_would_have_done_otherwise(self, log: Path) -> None:
        with open_log(log) as file:
            entries = [entry for _, entry in file.entries]
        core = Core(make_policy("request-level"))
        answers = [tuple(core.handle(one.events, one.now_s)) for one in entries]
        assert answers != [one.actions for one in entries]
