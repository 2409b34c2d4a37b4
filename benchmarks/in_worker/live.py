"""Synthetic requests that give a model live KV during a measurement."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from gpupoold.errors import Failed, Refused
from gpupoold.units import format_bytes

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine
    from gpupoold.worker.kv.residency import Residency

_PROMPT_TOKENS = 256
_MAX_STEPS = 10_000
_MAX_CLEARING_STEPS = 8
_numbers = itertools.count(1)


class BenchmarkRequests:
    """Greedy requests of one model with at least ``kv_bytes`` of KV; ``stop`` ends the requests."""

    def __init__(self, engine: ModelEngine, residency: Residency, kv_bytes: int) -> None:
        self.engine = engine
        self._residency = residency
        self._kv_bytes = kv_bytes
        room = engine.info.max_model_len
        num_tokens = -(-kv_bytes // engine.info.kv_bytes_per_token)
        self._length = max(1, min(_PROMPT_TOKENS, num_tokens, room // 2))
        self._num_left = room - self._length - 1
        count = -(-num_tokens // self._length)
        self._ids = [f"benchmark-{next(_numbers)}" for _ in range(count)]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the blocks in use, all of which must be on the device."""
        return self.engine.kv.index.num_used_on_device * self.engine.kv.geometry.block_bytes

    @property
    def can_step(self) -> bool:
        """True if another step ends no request."""
        return self._num_left > 1

    def start(self) -> None:
        """Prefill all requests; the model is resident afterwards.

        Raises:
            Refused: the KV does not fit.
        """
        engine = self.engine
        if len(self._ids) > engine.max_sequences:
            raise Refused(
                f"{engine.name} serves at most {engine.max_sequences} requests of {self._length} "
                f"tokens at once, too few for {format_bytes(self._kv_bytes)} of KV",
                "ask for less KV, or raise --max-len",
            )
        self._residency.make_resident(engine.name)
        for request_id in self._ids:
            engine.add_synthetic(request_id, self._length, self._num_left)
        self._wait_for_all()
        if self.kv_bytes < self._kv_bytes:
            raise Refused(f"{engine.name} has no room for {format_bytes(self._kv_bytes)} of KV")

    def step(self) -> float:
        """Run one step of the resident model, a token per request with KV; return its seconds."""
        self._num_left -= 1
        started_s = time.perf_counter()
        self._residency.ensure_kv(self.engine.name)
        self.engine.step()
        return time.perf_counter() - started_s

    def stop(self) -> None:
        """End the requests, if any, and free their KV."""
        engine = self.engine
        engine.abort(self._ids)
        engine.kv.discard_dead()
        for _ in range(_MAX_CLEARING_STEPS):  # the engine cleans ended requests up in a step
            if not engine.has_requests():
                break
            self._residency.switch_in(engine.name)
            engine.step()
        engine.kv.unmap(engine.kv.index.idle())

    def _wait_for_all(self) -> None:
        waiting = set(self._ids)
        for _ in range(_MAX_STEPS):
            self._residency.ensure_kv(self.engine.name)
            for item in self.engine.step():
                waiting.discard(item.request_id)
            self._num_left -= 1
            if not waiting:
                return
            if not self.can_step:
                break
        num = f"{len(waiting)} of {len(self._ids)}"
        raise Failed(f"{self.engine.name}: {num} synthetic requests do not start")
