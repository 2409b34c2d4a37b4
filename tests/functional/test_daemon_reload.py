"""The configuration is read again while the daemon serves, and nobody notices but those meant."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas import ReloadInfo
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.errors import ConfigError, Refused
from tests.functional.daemon_tools import (
    LLAMA,
    MODELS,
    Background,
    ask,
    cli,
    device,
    eventually,
    frontend_pids,
    ps,
    until,
    weight_bytes,
)

PROMPT = "The configuration has changed, and so"
NUM_RELOADS = 100
NUM_TOKENS = 400

Rewrite = Callable[[str], ReloadInfo]
"""Write a file of these sections beside those that were there, and reload."""


@pytest.fixture
def rewrite(pool: PrivateDaemon) -> Iterator[Rewrite]:
    """At the end the file is as it was, and has been reloaded."""
    path = config_path(pool)
    original = path.read_text()

    def write(added: str) -> ReloadInfo:
        path.write_text(merged(original, added))
        return reload(pool)

    yield write
    path.write_text(original)
    reload(pool)
    with pool.client() as client:
        assert client.config_diff().changes == []


def config_path(pool: PrivateDaemon) -> Path:
    return pool.log_path.parent / "gpupool.toml"


def merged(original: str, added: str) -> str:
    """``added``'s keys under the sections of ``original``, before what these have."""
    for block in added.strip().split("\n["):
        header, _, keys = block.lstrip("[").partition("\n")
        section = f"[{header}\n"
        if section in original:
            names = {line.partition("=")[0].strip() for line in keys.splitlines()}
            start = original.index(section) + len(section)
            head, rest = original[:start], original[start:]
            end = rest.find("\n[")
            own = rest if end < 0 else rest[: end + 1]
            kept = [one for one in own.splitlines() if one.partition("=")[0].strip() not in names]
            original = head + keys + "\n" + "\n".join(kept) + "\n" + rest[len(own) :]
        else:
            original += f"\n{section}{keys}\n"
    return original


def reload(pool: PrivateDaemon) -> ReloadInfo:
    with pool.client() as client:
        return client.reload()


def settings(pool: PrivateDaemon) -> dict[str, Any]:
    with pool.client() as client:
        return {one.key: one.value for one in client.config().settings}


def last_event(pool: PrivateDaemon) -> tuple[str, str]:
    with pool.client() as client:
        event = client.events()[-1]
    return event.kind, event.message


@pytest.mark.slow
async def test_streams_do_not_notice_a_hundred_reloads(
    pool: PrivateDaemon, api: AsyncOpenAI, rewrite: Rewrite
) -> None:
    names = MODELS[:2]
    answers = await asyncio.gather(*(ask(api, name, PROMPT, NUM_TOKENS) for name in names))
    before = dict(zip(names, answers, strict=True))
    pids = [row.pid for row in ps(pool).devices], frontend_pids(pool)
    streams = [Background(api, name, PROMPT, NUM_TOKENS) for name in names]
    for stream in streams:
        await stream.started()
    reloading = asyncio.create_task(asyncio.to_thread(reload_often, pool))
    while not reloading.done():
        for index, name in enumerate(names):
            if not streams[index].is_running:
                assert (await streams[index].finished()).token_ids == before[name].token_ids
                streams[index] = Background(api, name, PROMPT, NUM_TOKENS)
        await asyncio.sleep(0.01)
    assert await reloading == NUM_RELOADS
    for name, stream in zip(names, streams, strict=True):
        assert (await stream.finished()).token_ids == before[name].token_ids
    assert pids == ([row.pid for row in ps(pool).devices], frontend_pids(pool))
    kinds = {event.kind for event in events(pool, NUM_RELOADS)}
    assert not kinds & {"worker_down", "frontend_down", "model_added", "model_failed"}


def reload_often(pool: PrivateDaemon) -> int:
    """How many reloads have changed every one of the keys."""
    path = config_path(pool)
    original, num_done = path.read_text(), 0
    with pool.client() as client:
        for number in range(NUM_RELOADS):
            odd = number % 2
            text = (
                f'[scheduling]\nquota_max = "{300 + 100 * odd}ms"\n'
                f'[limits]\ntoken_timeout = "{60 + odd}s"\nmax_live_requests = {50 + odd}\n'
                f'[log]\nlevel = "{("debug", "warning")[odd]}"\n'
                f"[memory]\nself_check_interval = {1001 + odd}\n"
                f"[server]\nmax_body = {10_000 + odd}\n"
            )
            path.write_text(merged(original, text))
            num_done += len(client.reload().changed) == text.count("=")
    return num_done


def events(pool: PrivateDaemon, limit: int) -> list[Any]:
    with pool.client() as client:
        return client.events(limit=limit)


class TestWrongFile:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('[limits]\nstop_grace = "3s"\nzzz = 1\n', "limits.zzz: unknown key"),
            ('[limits]\nstop_grace = "3s"\n[log]\nlevel = "loud"\n', "log.level: must be"),
            ("[limits]\nstop_grace = \n", "is not valid TOML"),
        ],
    )
    def test_changes_nothing(
        self, pool: PrivateDaemon, rewrite: Rewrite, text: str, said: str
    ) -> None:
        before = settings(pool)
        with pytest.raises(ConfigError, match=r"gpupool.toml: line \d+: ") as caught:
            rewrite(text)
        assert said in str(caught.value)
        assert settings(pool) == before
        kind, message = last_event(pool)
        assert kind == "config_refused"
        assert said in message

    def test_a_file_that_is_gone_changes_nothing(
        self, pool: PrivateDaemon, rewrite: Rewrite
    ) -> None:
        path, before = config_path(pool), settings(pool)
        path.rename(path.with_suffix(".away"))
        try:
            with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
                reload(pool)
        finally:
            path.with_suffix(".away").rename(path)
        assert settings(pool) == before

    def test_a_cache_too_small_for_pinned_snapshots_is_refused(
        self, pool: PrivateDaemon, rewrite: Rewrite
    ) -> None:
        with pool.client() as client:
            client.pin(LLAMA)
        try:
            with pytest.raises(Refused, match=f"too small for the pinned snapshots of {LLAMA}"):
                rewrite('[memory]\nmodel_cache = "1MiB"\n[limits]\nstop_grace = "3s"\n')
            assert settings(pool)["limits.stop_grace"] == "10s"
        finally:
            with pool.client() as client:
                client.pin(LLAMA, is_pinned=False)


class TestWhatIsHeeded:
    def test_what_needs_a_restart_is_named_and_the_rest_is_heeded(
        self, pool: PrivateDaemon, rewrite: Rewrite
    ) -> None:
        answer = rewrite('[memory]\nkv_host = "123MiB"\n[limits]\nstop_grace = "3s"\n')
        assert [one.key for one in answer.changed] == ["limits.stop_grace"]
        assert [one.key for one in answer.waiting] == ["memory.kv_host"]
        assert settings(pool)["limits.stop_grace"] == "3s"
        assert settings(pool)["memory.kv_host"] != "123MiB"
        again = reload(pool)
        assert again.changed == []
        assert again.waiting == answer.waiting
        assert last_event(pool) == ("config_reloaded", "after a restart memory.kv_host")

    def test_a_request_body_may_be_larger_or_not(
        self, pool: PrivateDaemon, http: httpx.Client, rewrite: Rewrite
    ) -> None:
        body = {"model": LLAMA, "prompt": "x" * 600, "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        rewrite("[server]\nmax_body = 500\n")
        until(lambda: http.post("/v1/completions", json=body).status_code == 413)

    def test_limits_hold_from_then_on(
        self, pool: PrivateDaemon, http: httpx.Client, rewrite: Rewrite
    ) -> None:
        body = {"model": LLAMA, "prompt": ["a", "b", "c"], "max_tokens": 2}
        rewrite("[limits]\nmax_live_requests_per_model = 2\n")
        # The frontend refuses what could never be taken, the daemon what cannot be taken now.
        assert http.post("/v1/completions", json=body).status_code in (400, 429)

    async def test_a_smaller_cache_lets_idle_snapshots_go(
        self, pool: PrivateDaemon, api: AsyncOpenAI, rewrite: Rewrite, tiny_models: dict[str, Path]
    ) -> None:
        for name in MODELS:
            await asyncio.to_thread(warm, pool, name)
        room = int(2.5 * max(weight_bytes(path) for path in tiny_models.values()))
        before = await ask(api, LLAMA, PROMPT)
        await asyncio.to_thread(rewrite, f"[memory]\nmodel_cache = {room}\n")
        await eventually(lambda: cache_bytes(pool) <= room)
        assert cache_bytes(pool) > 0
        assert await ask(api, LLAMA, PROMPT) == before

    def test_models_are_looked_for_in_another_folder(
        self, pool: PrivateDaemon, rewrite: Rewrite, tiny_models: dict[str, Path], tmp_path: Path
    ) -> None:
        (tmp_path / "elsewhere").symlink_to(tiny_models[LLAMA])
        request = AddModelRequest(name="elsewhere", check_only=True)
        rewrite(f'[paths]\nmodel_dirs = ["{tmp_path}"]\n')
        with pool.client() as client:
            *_, last = client.add_model(request)
        assert last.model is not None
        assert Path(last.model.path) == tiny_models[LLAMA].resolve()

    def test_a_quieter_log_is_quiet(self, pool: PrivateDaemon, rewrite: Rewrite) -> None:
        rewrite('[log]\nlevel = "error"\n')
        size = pool.log_path.stat().st_size
        rewrite('[log]\nlevel = "error"\n[limits]\nstop_grace = "3s"\n')
        assert pool.log_path.stat().st_size == size

    def test_a_role_from_the_file(self, pool: PrivateDaemon, rewrite: Rewrite) -> None:
        rewrite('[scheduling]\nroles = ["mixed"]\n')
        assert device(pool).is_role_fixed
        rewrite('[scheduling]\nroles = "auto"\n')
        assert not device(pool).is_role_fixed


def warm(pool: PrivateDaemon, name: str) -> None:
    with pool.client() as client:
        client.warm(name)


def cache_bytes(pool: PrivateDaemon) -> int:
    with pool.client() as client:
        return client.status().model_cache_bytes


class TestHowItIsAsked:
    def test_by_a_signal(self, pool: PrivateDaemon, rewrite: Rewrite) -> None:
        path = config_path(pool)
        text = path.read_text()
        path.write_text(merged(text, '[limits]\nstop_grace = "7s"\n'))
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: settings(pool)["limits.stop_grace"] == "7s")
        path.write_text("[limits\n")
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: last_event(pool)[0] == "config_refused")
        assert settings(pool)["limits.stop_grace"] == "7s"
        path.write_text(text)

    def test_by_the_command_line(self, pool: PrivateDaemon, rewrite: Rewrite) -> None:
        path = config_path(pool)
        text = path.read_text()
        path.write_text(merged(text, '[limits]\nstop_grace = "8s"\n[memory]\nkv_host = "1MiB"\n'))
        told = cli(pool, "config", "diff")
        assert told.returncode == 0
        assert [line.split()[0] for line in told.stdout.splitlines()[1:]] == [
            "memory.kv_host",
            "limits.stop_grace",
        ]
        told = cli(pool, "reload")
        assert (told.returncode, told.stderr) == (
            0,
            f"{path} was read again: 1 changed, 1 waits for a restart of gpupoold\n",
        )
        shown = cli(pool, "config", "show")
        assert 'stop_grace = "8s"' in shown.stdout
        with pool.client() as client:
            assert client.config_diff(shown.stdout, "shown").changes == []
        path.write_text(text)
