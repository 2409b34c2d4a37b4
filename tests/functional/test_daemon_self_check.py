"""Weights that were damaged in memory: found out by the self-check, made anew, and all told."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import openai
import pytest

from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN3,
    api_client,
    ask,
    check,
    emulated_config,
    private_daemon,
    until,
    weight_bytes,
)

pytestmark = pytest.mark.slow

PROMPT = "The self-check in the coal mine"


def test_damaged_weights_are_made_anew(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """One model at a time fits, so that every question brings weights in.

    That self-checks are asked at all is told the worker when it has run for a while.
    """
    paths = {name: tiny_models[name] for name in (LLAMA, QWEN3)}
    config = emulated_config(int(1.4 * max(weight_bytes(path) for path in paths.values())))
    with private_daemon(f"{config}[memory]\nself_check_interval = 0\n", tmp_path) as daemon:
        for name, path in paths.items():
            daemon.add_model(name, path, **LOAD_OPTIONS)
        file = tmp_path / "gpupool.toml"
        file.write_text(
            file.read_text().replace("self_check_interval = 0", "self_check_interval = 2")
        )
        with daemon.client() as client:
            assert [one.key for one in client.reload().changed] == ["memory.self_check_interval"]

        async def in_turns(rounds: int) -> list[object]:
            async with api_client(daemon.http_url) as api:
                names = [name for _ in range(rounds) for name in (LLAMA, QWEN3)]
                answers: list[object] = []
                for name in names:
                    try:
                        answers.append(await ask(api, name, PROMPT))
                    except openai.APIError as error:
                        answers.append(error)
                return answers

        first = asyncio.run(in_turns(1))
        assert asyncio.run(in_turns(4)) == first * 4
        _damage_snapshot(daemon.process.pid, LLAMA)
        asyncio.run(in_turns(4))  # some are wrong, or end with an error: nobody can know before

        def told() -> list[str]:
            with daemon.client() as client:
                return [e.message for e in client.events() if e.kind == "self_check_failed"]

        until(lambda: bool(told()))
        assert len(told()) == 1
        assert "self-check answered" in told()[0]
        assert asyncio.run(in_turns(2)) == first * 2
        check(daemon)


def _damage_snapshot(pid: int, model: str) -> None:
    """Overwrite half of a model's snapshot, which all processes share."""
    folder = Path(f"/proc/{pid}/fd")
    [file] = [one for one in folder.iterdir() if f"snapshot-{model}" in os.readlink(one)]
    fd = os.open(file, os.O_RDWR)
    os.pwrite(fd, b"\x3f" * (os.fstat(fd).st_size // 2), 0)
    os.close(fd)
