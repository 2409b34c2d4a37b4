"""Dead nodes, found by the probes and requests of an entrance."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping

import aiohttp

_EVERY_S = 0.5
_TIMEOUT_S = 1.5
# Failed probes in a row of a dead node; after a refused connection a node is dead at once.
_LIMIT = 2


class Liveness:
    """Probes nodes and breaks the answers of dead nodes; for the event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._urls: dict[str, str] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._num_failed: dict[str, int] = {}
        self._answers: defaultdict[str, set[aiohttp.ClientResponse]] = defaultdict(set)

    @property
    def dead(self) -> frozenset[str]:
        """The nodes that do not answer now."""
        return frozenset(name for name, num in self._num_failed.items() if num >= _LIMIT)

    def watch(self, urls: Mapping[str, str]) -> None:
        """Probe these nodes from now on instead of earlier nodes."""
        for name in self._urls.keys() - urls.keys():
            self._probes.pop(name).cancel()
            self._num_failed.pop(name, None)
        self._urls = dict(urls)
        for name in urls.keys() - self._probes.keys():
            self._probes[name] = asyncio.create_task(self._probe(name), name=f"probe {name}")

    def suspect(self, name: str) -> None:
        """Note a failed request to a node; the next probe decides."""
        if name in self._urls:
            self._num_failed[name] = max(self._num_failed.get(name, 0), _LIMIT - 1)

    @contextlib.contextmanager
    def reading(self, name: str, answer: aiohttp.ClientResponse) -> Iterator[None]:
        """Close the connection of an answer if the node dies in the context.

        A machine without power closes no connection.
        """
        self._answers[name].add(answer)
        try:
            yield
        finally:
            self._answers[name].discard(answer)

    async def close(self) -> None:
        """End the probes."""
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    async def _probe(self, name: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        while True:
            try:
                asking = self._session.get(
                    f"{self._urls[name]}/health", timeout=timeout, allow_redirects=False
                )
                async with asking as answer:
                    await answer.content.readany()
                self._num_failed[name] = 0
            except aiohttp.ClientConnectorError:
                self._failed(name, _LIMIT)
            except (aiohttp.ClientError, TimeoutError):
                self._failed(name, self._num_failed.get(name, 0) + 1)
            await asyncio.sleep(_EVERY_S)

    def _failed(self, name: str, num: int) -> None:
        self._num_failed[name] = num
        if num >= _LIMIT:
            for answer in self._answers[name]:
                answer.close()
