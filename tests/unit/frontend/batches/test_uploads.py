"""Uploads: slow clients, places of keys, and what a client that leaves gives back."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.datastructures import UploadFile

from gpupoold.frontend.batches import api
from gpupoold.frontend.batches.api import MAX_WAITING, Uploads
from gpupoold.frontend.body import Disconnected
from gpupoold.frontend.errors import ApiError

pytestmark = pytest.mark.asyncio
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
SCOPE: dict[str, Any] = {
    "type": "http",
    "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
}


class Client:
    """Sends the pieces that it is given, then nothing until :meth:`end`."""

    def __init__(self, *pieces: bytes) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for piece in pieces:
            self.send(piece)

    def send(self, piece: bytes, *, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def end(self) -> None:
        self.send(b"\r\n--b--\r\n", more=False)

    async def receive(self) -> MutableMapping[str, Any]:
        return await self.messages.get()


async def upload(reader: Uploads, key: str, client: Client) -> bytes:
    async with reader.form(key, SCOPE, client.receive) as form:
        file = form["file"]
        assert isinstance(file, UploadFile)
        return await file.read()


class Clock:
    """The time of uploads, which the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_slow_client_is_ended() -> None:
    client, clock = Client(HEAD), Clock()
    task = asyncio.create_task(upload(Uploads(10**6, clock), "a", client))
    for _ in range(3):
        await asyncio.sleep(0.01)
        assert not task.done()
        clock.now_s += 25
        client.send(b".")
    with pytest.raises(ApiError) as caught:
        await task
    assert caught.value.status == 408


async def test_a_steady_client_may_take_long() -> None:
    client, clock = Client(HEAD), Clock()
    task = asyncio.create_task(upload(Uploads(10**9, clock), "a", client))
    for _ in range(20):
        await asyncio.sleep(0.01)
        clock.now_s += 25
        client.send(b"." * (1 << 20))
    client.end()
    assert len(await task) == 20 << 20


async def test_a_key_takes_half_of_the_places_and_others_upload_meanwhile() -> None:
    reader = Uploads(10**6)
    clients = [Client(HEAD) for _ in range(2 + MAX_WAITING)]
    tasks = [asyncio.create_task(upload(reader, "a", one)) for one in clients]
    await asyncio.sleep(0.01)
    assert [one.messages.empty() for one in clients] == [True] * 2 + [False] * MAX_WAITING
    with pytest.raises(ApiError) as caught:
        await upload(reader, "a", Client(HEAD))
    assert caught.value.status == 429
    for key in "bc":
        client = Client(HEAD, b"content")
        client.end()
        assert await upload(reader, key, client) == b"content"
    for one in clients:
        one.send(b"later")
        one.end()
    assert set(await asyncio.gather(*tasks)) == {b"later"}


async def test_a_wait_for_a_place_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_WAIT_S", 0.05)
    reader = Uploads(10**6)
    held = [asyncio.create_task(upload(reader, "a", Client(HEAD))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await upload(reader, "a", Client(HEAD))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 5.0)
    for one in held:
        one.cancel()
    await asyncio.wait(held)
    client = Client(HEAD, b"x")
    client.end()
    assert await upload(reader, "a", client) == b"x"


async def test_a_client_that_leaves_releases_its_place() -> None:
    reader = Uploads(10**6)
    for _ in range(10):
        client = Client(HEAD)
        client.messages.put_nowait({"type": "http.disconnect"})
        with pytest.raises(Disconnected):
            await upload(reader, "a", client)


async def test_too_much_is_ended_while_it_arrives() -> None:
    client = Client(HEAD, *[b"." * 100_000] * 4)
    with pytest.raises(ApiError) as caught:
        await upload(Uploads(200_000), "a", client)
    assert caught.value.status == 413
