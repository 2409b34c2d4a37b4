"""The admin socket's door: real connections of real users at a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gpupoold.access.peers import AdminGroups, NameService
from gpupoold.admin.app import Door, Guard, PeerProtocol

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

# Nothing here may take so long, on however busy a machine.
PATIENCE_S = 60.0
STRANGER, ADMINS, READERS = 4_000_000, 4_000_001, 4_000_002
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LONG = 8 << 20

# Connects as often as it is told, and says how each connection ended and what came before.
SOMEBODY = """
import os, socket, sys
group, count = int(sys.argv[1]), int(sys.argv[2])
word = sys.argv[3].encode().decode("unicode_escape")
os.setgroups([])
os.setgid(group)
os.setuid(4000000)
connections = []
for _ in range(count):
    connections.append(socket.socket(socket.AF_UNIX))
    connections[-1].settimeout(60)
    connections[-1].connect("admin.sock")
    if word:
        connections[-1].sendall(word.encode())
print("connected", flush=True)
for one in connections:
    came = b""
    try:
        while piece := one.recv(65536):
            came += piece
    except ConnectionResetError:
        pass
    print(came.split(b" ")[1].decode(), came.rpartition(b"\\r\\n")[2].decode(), flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="gpupool-door-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def groups(
    find: Callable[[str], int | None] = {"admins": ADMINS, "readers": READERS}.get,
) -> AdminGroups:
    return AdminGroups("admins", "readers", NameService(find_group=find))


async def _app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    body = bytes(LONG) if scope["path"] == "/long" else b"true"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(folder: Path, door: Door) -> AsyncIterator[uvicorn.Server]:
    """A server with this door at ``admin.sock`` in the folder."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "admin.sock"))
    (folder / "admin.sock").chmod(0o666)
    listener.listen(1024)
    config = uvicorn.Config(
        Guard(_app, door.groups),
        http=door.protocol(),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(folder: Path, count: int = 1) -> AsyncIterator[list[Opened]]:
    """Connections of the daemon's own user."""
    opened = [await asyncio.open_unix_connection(str(folder / "admin.sock")) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.sleep(0)


async def answer(opened: Opened, asked: bytes = GET) -> tuple[int, Any]:
    """Status and body of a call."""
    reader, writer = opened
    writer.write(asked)
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def own_answer(folder: Path) -> tuple[int, Any]:
    async with connected(folder) as [opened]:
        return await answer(opened)


async def somebody(
    folder: Path, group: int, count: int, word: str, meanwhile: Callable[[], Awaitable[None]]
) -> list[tuple[int, Any]]:
    """How the connections of another user end; ``meanwhile`` is called when all are there."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-ISc", SOMEBODY, str(group), str(count), word),
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await child.stdout.readline() == b"connected\n"
        await meanwhile()
        said = (await child.stdout.read()).decode().splitlines()
        assert await child.wait() == 0
    return [(int(status), json.loads(body)) for status, _, body in (x.partition(" ") for x in said)]


@needs_root
@pytest.mark.parametrize("word", ["", "GET", "POST /keys HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n"])
async def test_strangers_are_told_why_and_let_go_whatever_they_send(
    folder: Path, word: str
) -> None:
    door = Door(groups())
    async with serving(folder, door) as server:

        async def meanwhile() -> None:
            assert await own_answer(folder) == (200, True)

        for status, body in await somebody(folder, STRANGER, 5, word, meanwhile):
            assert status == 403
            assert f"the user {STRANGER} may not use the admin socket" in body["error"]["message"]
            assert "usermod -aG readers" in body["error"]["hint"]
        async with asyncio.timeout(PATIENCE_S):
            while server.server_state.connections:
                await asyncio.sleep(0.01)


@needs_root
async def test_one_user_has_a_number_of_connections(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Door, "max_connections", 20)
    door = Door(groups())
    async with serving(folder, door) as server:

        async def meanwhile() -> None:
            assert await own_answer(folder) == (200, True)
            assert len(server.server_state.connections) <= 22

        ends = await somebody(folder, STRANGER, 300, "", meanwhile)
        assert {status for status, _ in ends} == {403, 503}
        async with connected(folder, 20) as own:
            assert [await answer(one) for one in own] == [(200, True)] * 20
            status, body = await own_answer(folder)
            assert (status, body["error"]["code"]) == (503, "unavailable")
            assert "20 connections" in body["error"]["message"]
        async with asyncio.timeout(PATIENCE_S):
            while (await own_answer(folder))[0] != 200:
                await asyncio.sleep(0.01)


@needs_root
async def test_slow_name_service_holds_up_only_those_it_decides_about(folder: Path) -> None:
    goes_on = threading.Event()

    def find(name: str) -> int | None:
        goes_on.wait(PATIENCE_S)
        return {"admins": ADMINS, "readers": READERS}[name]

    door = Door(groups(find))
    assert not await door.groups.look_up(0.01)
    async with serving(folder, door):

        async def meanwhile() -> None:
            for _ in range(10):
                assert await own_answer(folder) == (200, True)
            goes_on.set()

        word = "GET / HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n"
        assert await somebody(folder, READERS, 3, word, meanwhile) == [(200, True)] * 3
        [(status, _)] = await somebody(folder, STRANGER, 1, word, meanwhile)
        assert status == 403


@needs_root
async def test_name_service_that_never_answers(folder: Path) -> None:
    """Who is in one of the groups is not known; all others go on."""
    door = Door(groups(lambda _: threading.Event().wait(PATIENCE_S) or None))
    async with serving(folder, door):

        async def meanwhile() -> None:
            assert await own_answer(folder) == (200, True)

        ends = await somebody(folder, READERS, 3, "", meanwhile)
        assert [status for status, _ in ends] == [403] * 3


async def test_head_that_does_not_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerProtocol, "head_timeout_s", 0.05)
    async with serving(folder, Door(groups())), connected(folder, 2) as [silent, slow]:
        status, body = await answer(slow, GET[:-2])
        assert (status, body["error"]["code"]) == (408, "timed_out")
        assert await answer(silent) == (200, True)


async def test_body_that_does_not_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a byte of it comes now and then."""
    monkeypatch.setattr(PeerProtocol, "body_timeout_s", 0.2)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n"
    async with serving(folder, Door(groups())), connected(folder) as [opened]:
        opened[1].write(head)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 0.1  # a write after the answer could end the client's reader
        while loop.time() < until_s:
            opened[1].write(b"x")
            await asyncio.sleep(0.02)
        status, body = await answer(opened, b"")
        assert (status, body["error"]["code"]) == (408, "timed_out")
        assert await own_answer(folder) == (200, True)


async def test_body_without_an_end(folder: Path) -> None:
    size = PeerProtocol.max_body_bytes
    head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n"
    async with serving(folder, Door(groups())), connected(folder, 2) as [fits, too_long]:
        assert await answer(fits, head.format(size).encode() + bytes(size)) == (200, True)
        asked = head.format(size + 1).encode() + bytes(size + 1)
        status, body = await answer(too_long, asked)
        assert (status, body["error"]["code"]) == (413, "usage")
        assert f"larger than {size} bytes" in body["error"]["message"]


async def test_client_that_does_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerProtocol, "send_timeout_s", 0.1)
    async with serving(folder, Door(groups())) as server, connected(folder) as [(_, writer)]:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET.replace(b"/ ", b"/long "))
        async with asyncio.timeout(PATIENCE_S):
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            while server.server_state.connections:
                await asyncio.sleep(0.01)
        assert await own_answer(folder) == (200, True)


@pytest.mark.parametrize("flood", [b"a:b\r\n" * 10_000, b"a: " + b"b" * 50_000])
async def test_trailers_without_an_end(folder: Path, flood: bytes) -> None:
    async with serving(folder, Door(groups())), connected(folder) as [(_, writer)]:
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < LONG and not writer.is_closing():
                writer.write(flood)
                await writer.drain()
                await asyncio.sleep(0)
                num_sent += len(flood)
        assert num_sent < LONG
        assert (await own_answer(folder))[0] == 200


async def test_body_behind_an_upgrade_is_read(folder: Path) -> None:
    call = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    async with serving(folder, Door(groups())), connected(folder) as [opened]:
        asked = call + b"Content-Length: %d\r\n\r\n" % len(GET) + GET + GET
        assert await answer(opened, asked) == (200, True)
        assert await answer(opened, b"") == (200, True)
