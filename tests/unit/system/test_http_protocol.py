"""Forms of HTTP that hide something from the application, at a real server on a local port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest

from gpupoold.system.http_protocol import BoundedHttp
from tests.raw_http import Client, Connect, http_server

CHUNKED = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"
FLOOD_BYTES = 64 << 20


class PlainHttp(BoundedHttp):
    """A connection whose refusals are as simple as possible."""

    def refusal(self, status: HTTPStatus, message: str) -> dict[str, object]:
        return {"refused": message}


class Application:
    """Answers with the request as seen; a path of ``/stream`` answers without a length."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.hold = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body = b""
        if scope["path"] != "/unread":
            while True:
                message = await receive()
                body += message.get("body", b"")
                if message["type"] == "http.disconnect":
                    self.gone.set()
                    return
                if not message["more_body"]:
                    break
        if scope["path"] == "/hold":
            await self._stream_until_gone(receive, send)
            return
        headers = [[name.decode(), value.decode()] for name, value in scope["headers"]]
        seen = {"path": scope["path"], "body": body.decode("latin-1"), "headers": headers}
        answer = json.dumps(seen).encode()
        length = [] if scope["path"] == "/stream" else [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for index, byte in enumerate((answer[:9], answer[9:])):
            await send({"type": "http.response.body", "body": byte, "more_body": index == 0})

    async def _stream_until_gone(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
            await asyncio.wait({gone}, timeout=0.01)
        assert gone.result()["type"] == "http.disconnect"
        self.gone.set()


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def connect(application: Application) -> AsyncIterator[Connect]:
    async with http_server(application, PlainHttp) as connect:
        yield connect


def _head(answer: dict[str, Any]) -> dict[str, str]:
    return dict(answer["headers"])


async def _refused(client: Client, part: str) -> None:
    status, body = await client.answer()
    assert status == 400
    assert part in body["refused"]
    assert await client.closed()


class TestTrailers:
    @pytest.mark.parametrize(
        "trailers",
        [
            b"Host: evil\r\n",
            b"Authorization: Bearer x\r\nOrigin: x\r\n",
            b"a:\r\n",
            b"A: b\r\n" * 9,
        ],
    )
    async def test_are_refused_and_no_headers(self, connect: Connect, trailers: bytes) -> None:
        client = await connect()
        client.writer.write(CHUNKED + b"2\r\nab\r\n0\r\n" + trailers + b"\r\n" + GET)
        await _refused(client, "railers")

    async def test_that_are_announced_but_not_sent_are_accepted(self, connect: Connect) -> None:
        client = await connect()
        head = CHUNKED.replace(b"Host", b"Trailer: x\r\nHost")
        client.writer.write(head + b"2;name=value\r\nab\r\n0;last\r\n\r\n" + GET)
        assert (await client.answer())[1]["body"] == "ab"
        assert (await client.answer())[1]["path"] == "/next"

    @pytest.mark.parametrize("path", [b"/x", b"/unread"])
    async def test_do_not_answer_twice(self, connect: Connect, path: bytes) -> None:
        client = await connect()
        client.writer.write(CHUNKED.replace(b"/x", path) + b"2\r\nab\r\n")
        if path == b"/unread":
            assert (await client.answer())[0] == 200
        client.writer.write(b"0\r\nHost: evil\r\n\r\n" + GET)
        if path == b"/unread":
            assert await client.closed()
        else:
            await _refused(client, "railers")

    async def test_behind_a_stream_end_the_stream_without_another_answer(
        self, connect: Connect, application: Application
    ) -> None:
        client = await connect()
        client.writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
        await client.reader.readuntil(b"piece")
        client.writer.write(CHUNKED + b"0\r\nHost: evil\r\n\r\n")
        assert b"HTTP/1.1" not in await client.all()
        async with asyncio.timeout(30):
            await application.gone.wait()


class TestWhatIsNeitherHeadNorBody:
    @pytest.mark.parametrize("path", [b"/x", b"/unread"])
    @pytest.mark.parametrize(
        ("begin", "piece"),
        [
            (b"0\r\n", b"a:b\r\n" * 10_000),
            (b"0\r\na:", b"b" * 50_000),
            (b"0\r\n", b"b" * 50_000),
            (b"1;", b"x" * 50_000),
            (b"", b"0" * 50_000),
            (b"", b"1;" + b"x" * 50_000 + b"\r\na\r\n"),
        ],
        ids=["trailers", "trailer", "trailer-name", "extension", "zeros", "extensions"],
    )
    async def test_is_bounded_and_takes_no_memory(
        self, connect: Connect, path: bytes, begin: bytes, piece: bytes
    ) -> None:
        client = await connect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        client.writer.write(CHUNKED.replace(b"/x", path) + begin)
        # The kernel's buffers of the connection take some MB before the sender sees the end.
        assert await client.send(piece, FLOOD_BYTES) < FLOOD_BYTES / 4
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10

    @pytest.mark.parametrize("first", [b"", GET])
    async def test_empty_lines_are_bounded(self, connect: Connect, first: bytes) -> None:
        client = await connect()
        client.writer.write(first)
        assert await client.send(b"\r\n" * 10_000, FLOOD_BYTES) < FLOOD_BYTES / 4

    async def test_small_chunks_are_no_framing(self, connect: Connect) -> None:
        """Chunks of one byte have five bytes of framing each."""
        body = b"".join(b"1\r\n%c\r\n" % (97 + index % 26) for index in range(100_000))
        client = await connect()
        client.writer.write(CHUNKED + body + b"0\r\n\r\n" + GET)
        status, seen = await client.answer()
        assert (status, len(seen["body"])) == (200, 100_000)
        assert (await client.answer())[1]["path"] == "/next"

    async def test_many_requests_are_no_framing(self, connect: Connect) -> None:
        client = await connect()
        client.writer.write(GET * 4_000)
        for _ in range(4_000):
            assert (await client.answer())[0] == 200


def _upgrade(
    value: bytes, method: bytes = b"POST", path: bytes = b"/x", body: bytes = b""
) -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return (
        method + b" " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: " + value + b"\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
        b"X-After: 1\r\n" + length + b"\r\n" + body
    )


class TestUpgrade:
    @pytest.mark.parametrize("value", [b"h2c", b"websocket", b"TLS/1.0, HTTP/2.0", b"", b"h2c, x"])
    @pytest.mark.parametrize("is_cut", [False, True])
    async def test_is_ignored_and_the_body_is_read(
        self, connect: Connect, application: Application, value: bytes, is_cut: bool
    ) -> None:
        client = await connect()
        smuggled = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
        request = _upgrade(value, body=smuggled)
        if is_cut:
            for index in range(len(request)):
                client.writer.write(request[index : index + 1])
                await client.writer.drain()
                await asyncio.sleep(0)
        else:
            client.writer.write(request)
        client.writer.write(GET)
        status, seen = await client.answer()
        assert (status, seen["body"].encode()) == (200, smuggled)
        assert _head(seen)["x-after"] == "1"
        assert (await client.answer())[1]["path"] == "/next"
        assert application.paths == ["/x", "/next"]

    async def test_body_in_a_later_segment_is_no_request(
        self, connect: Connect, application: Application
    ) -> None:
        client = await connect()
        request = _upgrade(b"h2c", body=GET)
        client.writer.write(request[: -len(GET)])
        await client.writer.drain()
        async with asyncio.timeout(30):
            while not application.paths:
                await asyncio.sleep(0.01)
        client.writer.write(GET)
        assert (await client.answer())[1]["body"].encode() == GET
        assert application.paths == ["/x"]

    async def test_chunked_body_is_read(self, connect: Connect) -> None:
        client = await connect()
        head = _upgrade(b"h2c")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
        client.writer.write(head + b"3\r\nabc\r\n0\r\n\r\n" + GET)
        assert (await client.answer())[1]["body"] == "abc"
        assert (await client.answer())[1]["path"] == "/next"

    async def test_pipelined_upgrades_are_answered_in_order(self, connect: Connect) -> None:
        client = await connect()
        paths = [b"/%d" % index for index in range(200)]
        client.writer.write(b"".join(_upgrade(b"h2c", b"GET", path) for path in paths) + GET)
        for path in [*paths, b"/next"]:
            assert (await client.answer())[1]["path"].encode() == path

    @pytest.mark.parametrize(
        "lines",
        [
            b"Content-Length: 3\r\nContent-Length: 4\r\n",
            b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
            b"Transfer-Encoding: xchunked\r\n",
        ],
    )
    async def test_ambiguous_lengths_are_refused_as_without(
        self, connect: Connect, application: Application, lines: bytes
    ) -> None:
        client = await connect()
        client.writer.write(_upgrade(b"h2c")[:-2] + lines + b"\r\nabc" + GET)
        assert (await client.answer())[0] == 400
        assert await client.closed()
        assert "/next" not in application.paths

    async def test_connection_without_upgrade(self, connect: Connect) -> None:
        client = await connect()
        request = _upgrade(b"h2c", body=b"abc").replace(b"Upgrade: h2c\r\n", b"")
        client.writer.write(request + GET)
        assert (await client.answer())[1]["body"] == "abc"
        assert (await client.answer())[1]["path"] == "/next"

    @pytest.mark.parametrize("target", [b"evil:80", b"/x", b"http://evil/"])
    async def test_connect_is_refused(
        self, connect: Connect, application: Application, target: bytes
    ) -> None:
        client = await connect()
        client.writer.write(_upgrade(b"h2c", b"CONNECT", target, body=GET))
        status, _ = await client.answer()
        assert status == 400
        assert await client.closed()
        assert application.paths == []


class TestHostOfAnAbsoluteUri:
    @pytest.mark.parametrize(
        ("url", "host"),
        [
            (b"http://evil/x", "evil"),
            (b"http://localhost:1@evil:80/x?y=http://localhost/", "evil:80"),
            (b"HTTP://[::1]:8000/x", "[::1]:8000"),
        ],
    )
    async def test_replaces_the_header(self, connect: Connect, url: bytes, host: str) -> None:
        client = await connect()
        client.writer.write(b"GET " + url + b" HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n")
        status, seen = await client.answer()
        assert (status, seen["path"]) == (200, "/x")
        assert [value for name, value in seen["headers"] if name == "host"] == [host]

    @pytest.mark.parametrize("url", [b"/x?http://evil/", b"//evil/x", b"*"])
    async def test_other_forms_keep_the_header(self, connect: Connect, url: bytes) -> None:
        client = await connect()
        client.writer.write(b"OPTIONS " + url + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _head((await client.answer())[1])["host"] == "a"

    @pytest.mark.parametrize("url", [b"http://", b"http://[::1/x", b"x", b"http:///x"])
    async def test_uri_without_a_host_is_refused(self, connect: Connect, url: bytes) -> None:
        client = await connect()
        client.writer.write(b"GET " + url + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        await _refused(client, "")


class TestHttp10:
    @pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"])
    @pytest.mark.parametrize("path", [b"/x", b"/stream"])
    async def test_answers_have_no_chunks(self, connect: Connect, path: bytes, more: bytes) -> None:
        client = await connect()
        client.writer.write(
            b"POST " + path + b" HTTP/1.0\r\n" + more + b"Content-Length: 1\r\n\r\na"
        )
        head, _, body = (await client.all()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert json.loads(body)["body"] == "a"

    async def test_head_has_no_body(self, connect: Connect) -> None:
        client = await connect()
        client.writer.write(b"HEAD /stream HTTP/1.0\r\n\r\n")
        assert (await client.all()).endswith(b"\r\n\r\n")

    async def test_http11_still_has_chunks(self, connect: Connect) -> None:
        client = await connect()
        client.writer.write(GET.replace(b"/next", b"/stream") + GET)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        assert (await client.answer())[1]["path"] == "/next"


async def test_end_of_the_connection_ends_a_request_with_others_behind(
    connect: Connect, application: Application
) -> None:
    client = await connect()
    client.writer.write(b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n")
    await client.reader.readuntil(b"piece")
    client.writer.write(GET)
    await client.writer.drain()
    client.writer.close()
    with contextlib.suppress(ConnectionError):
        await client.writer.wait_closed()
    async with asyncio.timeout(30):
        await application.gone.wait()
