"""Fine-tunes whose requests take turns in one engine: all answers go on, and stay exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from benchmarks.fine_tunes import fine_tune, limit_engines
from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    api_client,
    ask,
    emulated_config,
    private_daemon,
    ps,
    weight_bytes,
)

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
PROMPT = "Once upon a time"
SHORT = 100
BUSY_S = 25.0


@pytest.fixture(scope="module")
def box(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A device with memory for one engine."""
    folder = tmp_path_factory.mktemp("shared")
    base = tiny_models[LLAMA]
    config = emulated_config(int(1.5 * weight_bytes(base)))
    with private_daemon(config, folder / "box") as daemon:
        for number, name in enumerate(NAMES):
            path = fine_tune(base, folder / name, number)
            daemon.add_model(name, path, **LOAD_OPTIONS)
            if not number:
                limit_engines(daemon)
        yield daemon


async def test_busy_models_take_turns(box: PrivateDaemon) -> None:
    """Two streams of each model are live at any time, so that the engine is never idle."""
    answers: dict[str, list[list[int]]] = {name: [] for name in NAMES}
    in_time = set[str]()

    async def keep_busy(api: AsyncOpenAI, name: str, num_tokens: int, end_s: float) -> None:
        while time.monotonic() < end_s:
            answers[name].append((await ask(api, name, PROMPT, num_tokens)).token_ids)
            if time.monotonic() < end_s:
                in_time.add(name)

    async with api_client(box.http_url) as api:
        alone = {name: (await ask(api, name, PROMPT, LONG)).token_ids for name in NAMES}
        assert len(set(map(tuple, alone.values()))) == len(NAMES)
        assert sum(bool(model.engines) for model in ps(box).models) == 1
        end_s = time.monotonic() + BUSY_S
        lengths = [(name, num_tokens) for name in NAMES for num_tokens in (LONG, SHORT)]
        await asyncio.gather(*(keep_busy(api, *length, end_s) for length in lengths))
    log = box.log_path.read_text()
    for name in NAMES:
        assert all(answer == alone[name][: len(answer)] for answer in answers[name])
        assert {len(answer) for answer in answers[name]} == {LONG, SHORT}
        assert f"{name} waits with" in log, "the engine never left the model's requests"
    assert in_time == {*NAMES}, "a model waited until another had no requests"
    assert {model.state for model in ps(box).models} == {"ready"}
