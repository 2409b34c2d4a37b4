"""Uploads that send a byte now and then, and the uploads of another key beside them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

from benchmarks.fuzz import exchange

_NUM_DRIPPING = 18
_BYTE_S = 5.0
_NUM_UPLOADS = 8
_UPLOAD_S = 8.0
_PATIENCE_S = 90.0


async def drip(port: int, key: str) -> dict[str, Any]:
    """Hold as many uploads without a key as a frontend lets in and wait, and upload with ``key``.

    Returns the statuses of the first dripping uploads to be answered, and of the others.
    """
    dripping = [asyncio.create_task(_drip(port)) for _ in range(_NUM_DRIPPING)]
    statuses = []
    for _ in range(_NUM_UPLOADS):
        await asyncio.sleep(_UPLOAD_S)
        statuses.append(_status(await exchange(port, _upload(key))))
    done, _ = await asyncio.wait(dripping, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in dripping:
        task.cancel()
    await asyncio.gather(*dripping, return_exceptions=True)
    after = _status(await exchange(port, _upload("")))
    return {"ended": sorted(task.result() for task in done), "beside": statuses, "after": after}


async def _drip(port: int) -> int:
    """Send a form that never ends; return the status of the answer, 0 without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read(1000))
    try:
        writer.write(_head("", 10**6) + _part())
        while not answer.done():
            await asyncio.wait([answer], timeout=_BYTE_S)
            with contextlib.suppress(OSError):
                writer.write(b".")
        return _status(answer.result())
    finally:
        answer.cancel()
        writer.close()


def _upload(key: str) -> bytes:
    body = _part() + b'{}\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch'
    body += b"\r\n--b--\r\n"
    return _head(key, len(body)) + body


def _part() -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'


def _head(key: str, num_bytes: int) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{authorization}"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()


def _status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    return int(found[1]) if found else 0
