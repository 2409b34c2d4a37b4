"""``gpupool top`` and what is behind it, on a real daemon with simulated devices."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from gpupool_cli.private_daemon import PrivateDaemon
from gpupoold.admin.models import ModelUsage
from gpupoold.admin.models_top import Top
from gpupoold.checkpoints.hollow import make_hollow_checkpoint
from gpupoold.errors import NoSuchRequest, Refused
from tests.functional.daemon_tools import (
    Background,
    Restartable,
    api_client,
    ask,
    child_env,
    cli,
    eventually,
    until,
    usage,
)

MODELS = ("one", "two", "three")
SHAPE = "Qwen2.5-7B"
# Room for one of the three in float32 on each device.
CONFIG = """
[[device]]
kind = "sim"
gpu = "H800"
memory = "40GiB"
[[device]]
kind = "sim"
gpu = "H800"
memory = "40GiB"

[memory]
model_cache = 0
"""
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][0-9A-B]?)")


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    checkpoint = make_hollow_checkpoint(tmp_path_factory.mktemp("hollow"), SHAPE)
    folder = tmp_path_factory.mktemp("top")
    with contextlib.closing(Restartable(CONFIG, folder, dict.fromkeys(MODELS, checkpoint))) as box:
        yield box


@pytest.fixture
def daemon(daemons: Restartable) -> PrivateDaemon:
    return daemons.running()


def look(daemon: PrivateDaemon, turns_after: int = 0) -> Top:
    with daemon.client() as client:
        return client.top(turns_after)


class Terminal:
    """``gpupool top`` on a terminal of its own; what it has drawn, without its escapes."""

    def __init__(self, daemon: PrivateDaemon, *options: str, columns: int = 100) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpupool_cli.main", "top", "-d", "200ms", *options],
            env=child_env() | {"GPUPOOL_SOCKET": str(daemon.socket_path), "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while piece := os.read(self._ours, 1 << 16):
                self.raw += piece.decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def since(self, mark: int) -> str:
        """What was drawn since so many characters."""
        return ESCAPES.sub("", self.raw[mark:])

    def until(self, text: str, mark: int = 0) -> None:
        until(lambda: text in self.since(mark), 30)


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
        assert client.turns(before.last_turn_id) == after.turns
        assert [turn.id for turn in client.turns(0, 2)] == [turn.id for turn in after.turns[-2:]]


def test_a_request_is_cancelled(daemon: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(daemon.http_url) as api:
            stream = Background(api, "one", "a long story", 3000)
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
            forced = Background(api, "one", "a long story", 3000)
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


def test_no_daemon_and_no_theme(daemon: PrivateDaemon, tmp_path: Path) -> None:
    shown = cli(tmp_path / "none.sock", "top")
    assert shown.returncode == 3
    assert "no daemon answers" in shown.stderr
    with Terminal(daemon, "--theme", "no-such-theme") as terminal:
        assert terminal.process.wait(60) == 2
        terminal.until("no theme is called 'no-such-theme'")
        assert "textual-dark" in terminal.since(0)


def test_a_terminal_survives_the_daemons_restart(daemons: Restartable) -> None:
    daemon = daemons.running()
    with Terminal(daemon) as terminal:
        terminal.until("5 Events")
        terminal.press("1")
        mark = len(terminal.raw)
        terminal.press("1")
        terminal.until("KV-HOST", mark)
        terminal.press("\x1b")
        mark = len(terminal.raw)
        daemon.process.kill()
        daemon.process.wait(20)
        terminal.until("connection lost, trying again", mark)
        mark = len(terminal.raw)
        daemons.running()
        terminal.until("the daemon has started again", mark)
        assert terminal.process.poll() is None
        terminal.press("q")
        assert terminal.process.wait(20) == 0
        assert "Traceback" not in terminal.since(0)
