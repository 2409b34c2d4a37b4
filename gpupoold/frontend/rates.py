"""Requests to the daemon for permission by an API key's rates, kept for all frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gpupoold.frontend.errors import over_rate, rates_unavailable
from gpupoold.units import format_duration
from gpupoold.wire.messages import AskRate, KeyRecord, RateAnswer

_TIMEOUT_S = 5.0


class RateCalls:
    """Asks the daemon whether a request may begin; lives on the event loop."""

    def __init__(
        self, send: Callable[[msgspec.Struct], None], timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._next_call = 0
        self._asked: dict[int, asyncio.Future[RateAnswer]] = {}

    def answered(self, message: RateAnswer) -> None:
        """Handle the daemon's answer; ignore a late one."""
        asked = self._asked.get(message.call_id)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def begin(self, key: KeyRecord) -> None:
        """Return when the daemon has counted a request with this key.

        Raises:
            ApiError: 429: too many requests or tokens in too short a time; 503: the daemon does
                not answer in time.
        """
        answer = await self._ask(key)
        if answer.wait_s:
            raise over_rate(
                f"Rate limit reached for the API key `{key.name}`: {answer.limit}. "
                f"Try again in {format_duration(answer.wait_s)}.",
                answer.wait_s,
            )

    async def _ask(self, key: KeyRecord) -> RateAnswer:
        self._next_call += 1
        call_id = self._next_call
        asked: asyncio.Future[RateAnswer] = asyncio.get_running_loop().create_future()
        self._asked[call_id] = asked
        self._send(AskRate(call_id, key.id))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asked
        except TimeoutError:
            raise rates_unavailable() from None
        finally:
            del self._asked[call_id]
