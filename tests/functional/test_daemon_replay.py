"""The daemon and the simulator run the same core: what one did, the other does again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpupool_cli.private_daemon import PrivateDaemon, private_daemon
from gpupoold.pool.stimulus_file import read, replay_file
from gpupoold.scheduling.actions import RunTurn, Send
from gpupoold.scheduling.core import Core
from gpupoold.sim.policies import make_policy
from tests.functional.daemon_tools import (
    LOAD_OPTIONS,
    MODELS,
    api_client,
    ask,
    check,
    device_config,
    open_stream,
    ps,
    until,
    weight_bytes,
)

_MODELS = MODELS[:3]
_CONFIG = """
[scheduling]
quota_max = "100ms"
"""


@pytest.fixture(scope="module")
def log(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a daemon's core was told and did while many streams shared a device."""
    folder = tmp_path_factory.mktemp("replay")
    device_bytes = int(1.6 * max(weight_bytes(tiny_models[name]) for name in _MODELS))
    with private_daemon(device_config(device_bytes) + _CONFIG, folder) as daemon:
        for name in _MODELS:
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        asyncio.run(_load(daemon))
        until(lambda: not ps(daemon).requests)
        check(daemon)
        path = folder / "stimuli.jsonl"
        with daemon.client() as client:
            path.write_bytes(b"".join(line + b"\n" for line in client.stimuli()))
    return path


async def _load(daemon: PrivateDaemon) -> None:
    """Answers that take turns, and one whose client leaves."""
    async with api_client(daemon.http_url) as api:
        leaving = await open_stream(api, _MODELS[0], "never read to its end", 200)
        jobs = [ask(api, _MODELS[n % 3], f"prompt {n}", 48) for n in range(12)]
        await asyncio.gather(*jobs)
        await leaving.close()


def test_the_simulator_s_core_takes_the_same_actions(log: Path) -> None:
    assert replay_file(log) is None


def test_the_log_has_what_happened(log: Path) -> None:
    header, stimuli = read(log)
    assert header.policy == "gpupool"
    actions = [action for one in stimuli for action in one.actions]
    sent = [action.request_id for action in actions if isinstance(action, Send)]
    assert len(sent) == len(set(sent)) == 13
    turns = {a.turn.turn_id: a.turn.model for a in actions if isinstance(a, RunTurn) and a.turn}
    assert set(turns.values()) == set(_MODELS)
    assert len(turns) > len(_MODELS)  # somebody was paused and went on


def test_another_policy_would_have_done_otherwise(log: Path) -> None:
    _, stimuli = read(log)
    core = Core(make_policy("request-level"))
    answers = [tuple(core.handle(one.events, one.now_s)) for one in stimuli]
    assert answers != [one.actions for one in stimuli]
