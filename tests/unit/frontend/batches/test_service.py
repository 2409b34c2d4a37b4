"""Requests inside the process: the answer, its ``Retry-After`` and the message of an error."""

from __future__ import annotations

import asyncio

import pytest

from gpupoold.frontend.batches.service import Exchange
from gpupoold.frontend.batches.work import JsonAnswer
from gpupoold.frontend.errors import ApiError, send_error, send_json

pytestmark = pytest.mark.asyncio


async def test_an_answer() -> None:
    exchange = Exchange("/v1/completions", b"{}")
    assert (await exchange.receive())["body"] == b"{}"
    await send_json(exchange.send, 200, {"error": {"message": "no error"}})
    assert exchange.answer("id") == JsonAnswer(200, "id", b'{"error": {"message": "no error"}}')


async def test_a_refusal_has_its_reason_and_the_time_of_the_next_try() -> None:
    exchange = Exchange("/v1/completions", b"{}")
    await send_error(exchange.send, ApiError(503, "x" * 5000, retry_after_s=12.2))
    answer = exchange.answer("id")
    assert (answer.status, answer.retry_after_s, answer.reason) == (503, 13.0, "x" * 400)


async def test_a_cancellation_ends_work_that_waits_for_the_clients_end_only() -> None:
    exchange, seen = Exchange("/v1/completions", b"{}"), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("ended")
            raise

    async def app() -> None:
        """As vLLM's ``with_cancellation``: the work is a task of its own."""
        await exchange.receive()
        working = asyncio.create_task(work())
        message = await asyncio.create_task(exchange.receive())
        seen.append(message["type"])
        working.cancel()
        await asyncio.wait([working])

    asking = asyncio.create_task(exchange.run(app()))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert seen == ["http.disconnect", "ended"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"no JSON", b"\xff", b'{"error": "text"}'])
async def test_an_error_in_another_form(body: bytes) -> None:
    exchange = Exchange("/v1/completions", b"{}")
    headers = [(b"retry-after", b"Wed, 21 Oct 2015 07:28:00 GMT")]
    await exchange.send({"type": "http.response.start", "status": 500, "headers": headers})
    await exchange.send({"type": "http.response.body", "body": body})
    answer = exchange.answer("id")
    assert (answer.status, answer.retry_after_s, answer.reason) == (500, 0.0, "")
