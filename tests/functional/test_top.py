"""``gpupool top`` and what is behind it, on a real daemon with simulated devices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas import ModelUsage, Top
from gpupoold.errors import NoSuchRequest, Refused
from tests.functional.daemon_tools import Background, api_client, ask, cli, eventually, until, usage
from tests.functional.terminal import Terminal

MODELS = ("one", "two", "three")


@pytest.fixture
def daemon(sim_box: PrivateDaemon) -> PrivateDaemon:
    """Two simulated devices of which each has room for one of three models."""
    until(lambda: all(one.state == "ready" for one in look(sim_box).devices), 30)
    until(lambda: not look(sim_box).requests)
    return sim_box


def look(daemon: PrivateDaemon, turns_after: int = 0) -> Top:
    with daemon.client() as client:
        return client.top(turns_after)


@pytest.mark.slow
def test_devices_tell_how_their_memory_and_turn_are_split(daemon: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(daemon.http_url) as api:
            streams = [Background(api, name, "a story", 300) for name in MODELS]
            for stream in streams:
                await stream.started()
            await eventually(
                lambda: any(one.on_turn and one.quota_used_s > 0 for one in look(daemon).devices)
            )
            for device in look(daemon).devices:
                parts = device.weights_bytes + device.kv_bytes + device.free_bytes
                assert parts == device.device_bytes
                assert 0 <= device.prefetched_bytes <= device.weights_bytes
            for stream in streams:
                await stream.finished()

    asyncio.run(run())


def test_turns_have_their_tokens_and_switches(daemon: PrivateDaemon) -> None:
    before = look(daemon)
    tokens_before = sum(row.usage.tokens for row in before.models)

    async def run() -> None:
        async with api_client(daemon.http_url) as api:
            await asyncio.gather(*(ask(api, name, "once upon a time", 50) for name in MODELS * 2))

    asyncio.run(run())
    until(lambda: all(one.on_turn is None for one in look(daemon).devices))
    after = look(daemon, before.last_turn_id)
    assert [turn.id for turn in after.turns] == list(
        range(before.last_turn_id + 1, after.last_turn_id + 1)
    )
    tokens = sum(row.usage.tokens for row in after.models) - tokens_before
    assert sum(turn.num_tokens for turn in after.turns) == tokens == 300
    switches = [turn for turn in after.turns if turn.switch_kind == "weights"]
    assert {turn.model for turn in after.turns} == set(MODELS)
    assert switches
    assert all(turn.switch_s > 0 for turn in switches)
    with daemon.client() as client:
        assert [turn.id for turn in client.turns(before.last_turn_id)] == [
            turn.id for turn in after.turns
        ]
        assert [turn.id for turn in client.turns(0, 2)] == [turn.id for turn in after.turns[-2:]]


def test_a_request_is_cancelled(daemon: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(daemon.http_url) as api:
            stream = Background(api, "one", "a long story", 2000)
            await stream.started()
            [request] = look(daemon).requests
            shown = cli(daemon, "cancel", request.request_id)
            assert shown.returncode == 0, shown.stderr
            with pytest.raises(openai.APIError, match="cancelled by the operator"):
                await stream.finished()
            with daemon.client() as client, pytest.raises(NoSuchRequest):
                client.cancel(request.request_id)

    asyncio.run(run())
    assert not look(daemon).requests
    assert look(daemon).events[-1].kind == "request_cancelled"


@pytest.mark.slow
def test_a_model_is_unloaded_and_comes_back(daemon: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(daemon.http_url) as api:
            await ask(api, "one", "hello", 5)
            until(lambda: bool(row().weights_resident_bytes))
            stream = Background(api, "one", "a long story", 400)
            await stream.started()
            with daemon.client() as client, pytest.raises(Refused, match="live requests"):
                client.unload("one")
            shown = await asyncio.to_thread(cli, daemon, "unload", "one", "--drain")
            assert shown.returncode == 0, shown.stderr
            assert len((await stream.finished()).token_ids) == 400
            until(lambda: not row().weights_resident_bytes)
            assert row().state == "ready"
            assert len((await ask(api, "one", "hello", 5)).token_ids) == 5
            forced = Background(api, "one", "a long story", 2000)
            await forced.started()
            with daemon.client() as client:
                assert client.unload("one", "force").device_bytes > 0
            with pytest.raises(openai.APIError, match="unloaded"):
                await forced.finished()

    def row() -> ModelUsage:
        return usage(daemon, "one")

    asyncio.run(run())


def test_one_screen_as_text(daemon: PrivateDaemon) -> None:
    for options in ([], ["-1"], ["--once", "--ascii"]):
        shown = cli(daemon, "top", *options)
        assert shown.returncode == 0, shown.stderr
        assert "\x1b" not in shown.stdout
        for name in MODELS:
            assert name in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80
    assert shown.stdout.isascii()


def test_a_terminal(daemon: PrivateDaemon) -> None:
    with Terminal(daemon) as terminal:
        terminal.until("5 Events")
        terminal.press("q")
        assert terminal.process.wait(20) == 0
        assert "Traceback" not in terminal.since(0)


def test_no_daemon_and_no_theme(daemon: PrivateDaemon, tmp_path: Path) -> None:
    shown = cli(tmp_path / "none.sock", "top")
    assert shown.returncode == 3
    assert "no daemon answers" in shown.stderr
    with Terminal(daemon, "--theme", "no-such-theme") as terminal:
        assert terminal.process.wait(60) == 2
        terminal.until("no theme is called 'no-such-theme'")
        assert "textual-dark" in terminal.since(0)
