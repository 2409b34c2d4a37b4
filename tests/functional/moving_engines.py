"""Two engines of one checkpoint in one process: requests move between them at random points.

``python -m tests.functional.moving_engines CHECKPOINT DTYPE`` prints :class:`Figures` as JSON. The
device is small, so that engines, KV and states also move to the host and back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpupoold.domain import ModelName
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.pages import PagePool
from gpupoold.wire import messages as m
from gpupoold.worker.device import DriverMemory, open_device
from gpupoold.worker.engine.cpu_build import adapt_cpu_build
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.kv.page_eviction import Use
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.threads import TurnThread
from gpupoold.worker.turns.loads import EngineLoader
from tests.functional.worker_peer import encode_request

NAMES = ("here", "there")
NUM_TOKENS = 100
PROMPT_LENGTHS = (5, 33, 64, 150, 200, 350)
CHUNK_TOKENS = 12
_MAX_STEPS = 5000


@dataclass
class Figures:
    """What happened, and what was wrong."""

    num_moves: int = 0
    num_moves_in_prefill: int = 0
    num_moves_without_kv: int = 0
    num_tokens_computed_again: int = 0
    num_kv_out_bytes: int = 0
    distinct_tokens: list[int] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


@dataclass
class Moving:
    """A request on its way through the engines."""

    request_id: str
    frames: list[bytes]
    engine: str = NAMES[0]
    num_arrived: int | None = None
    """Tokens with KV at its arrival, None if it did not come with KV."""
    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False


class MovingEngines:
    """A device with two engines, and the requests in them."""

    def __init__(self, path: Path, dtype: str, room_bytes: int, seed: int) -> None:
        adapt_cpu_build()
        torch.set_num_threads(1)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        self._device = open_device("emulated", num_bytes + room_bytes, 0, 0)
        pool = PagePool(self._device.num_pages, self._device.table_pages)
        self.host = KvHostCache(64 << 20)
        self.residency = Residency(
            self._device, pool, self.host, 1e9, lambda _: Use(1, 0.0, 1.0, 0.0)
        )
        self.figures = Figures()
        self.requests: dict[str, Moving] = {}
        self._rng = random.Random(seed)
        self._scheduled: defaultdict[str, int] = defaultdict(int)  # tokens since the arrival
        loader = EngineLoader(
            self._device, self.host, self.residency, TurnThread(), DriverMemory(self._device)
        )
        self._engines: dict[str, ModelEngine] = {}
        for name in NAMES:
            model = m.ModelToLoad(
                name=ModelName(name), source="a", path=str(path), dtype=dtype, max_model_len=512
            )
            order = m.LoadModel(model, profiling_budget_s=0.0)
            self._engines[name] = loader.load(order, None, name).engine
            self._count_tokens(self._engines[name])

    def ask(self, prompts: dict[str, list[int]]) -> list[Moving]:
        """Queue requests in the first engine; none finds a prefix of another."""
        asked = []
        for request_id, prompt in prompts.items():
            frames = encode_request(
                request_id, prompt, cache_salt=request_id, max_tokens=NUM_TOKENS
            )
            moving = Moving(request_id, frames)
            self.requests[request_id] = moving
            self._engines[moving.engine].add(moving.frames)
            asked.append(moving)
        return asked

    def finish(self, asked: Iterable[Moving]) -> None:
        """Step until requests have ended where they are."""
        for moving in asked:
            for _ in range(_MAX_STEPS):
                if moving.has_ended:
                    break
                self._step(moving.engine, None)
            assert moving.has_ended

    def move_at_random(self, asked: list[Moving], *, has_chunks: bool, may_lose: bool) -> None:
        """Step and move requests until all have ended; with ``may_lose``, KV is lost sometimes."""
        while live := [moving for moving in asked if not moving.has_ended]:
            name = self._rng.choice(live).engine
            chunk_tokens = CHUNK_TOKENS if has_chunks and self._rng.random() < 0.8 else None
            for _ in range(self._rng.randrange(1, 9)):
                if any(one.engine == name and not one.has_ended for one in live):
                    self._step(name, chunk_tokens)
            if self._rng.random() < 0.3:
                self.figures.num_kv_out_bytes += self.residency.page_out(self._rng.choice(NAMES))
            if may_lose and self._rng.random() < 0.1:
                self._lose(self._rng.choice(NAMES))
            live = [moving for moving in live if not moving.has_ended]
            if live and self._rng.random() < 0.8:
                is_lost = may_lose and self._rng.random() < 0.3
                self._move(self._rng.choice(live), is_lost=is_lost)

    def close(self) -> None:
        """Check that nothing is left."""
        for engine in self._engines.values():
            engine.kv.discard_dead()
        self.residency.check_integrity()
        assert self.host.used_bytes == 0

    def _count_tokens(self, engine: ModelEngine) -> None:
        scheduler: Any = engine._scheduler
        schedule = scheduler.schedule

        def count(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                self._scheduled[request_id] += num_tokens
            return output

        scheduler.schedule = count

    def _step(self, name: str, chunk_tokens: int | None) -> None:
        engine = self._engines[name]
        self.residency.switch_in(name)
        self.residency.advance(name)
        if not engine.is_ready():
            self.residency.wait_ready(name)
        self.residency.ensure_kv(name)
        for step in engine.whole_steps(chunk_tokens):
            for item in step.progress:
                if item.request_id not in self.requests:
                    continue
                moving = self.requests[item.request_id]
                moving.tokens += item.new_token_ids
                if item.finish_reason is not None:
                    moving.has_ended = True
                    self._count_again(moving, len_of(moving) - 1)
        self.residency.check_integrity()

    def _move(self, moving: Moving, *, is_lost: bool) -> None:
        source, name = self._engines[moving.engine], moving.request_id
        computed = source.computed_kv(name)
        assert computed is not None
        self._count_again(moving, computed.num_tokens)
        exported = None
        if computed.blocks and not is_lost:
            exported = self.residency.export(moving.engine, computed.blocks, lambda _: None)
            assert exported is not None
        source.abort([name])
        source.kv.discard_dead()
        [moving.engine] = set(NAMES) - {moving.engine}
        moving.num_arrived = None
        self._scheduled[name] = 0
        target = self._engines[moving.engine]
        self.figures.num_moves += 1
        self.figures.num_moves_in_prefill += bool(computed.blocks) and not moving.tokens
        if exported is None:
            self.figures.num_moves_without_kv += bool(moving.tokens)
            target.add(moving.frames, moving.tokens)
            return
        slot, transfer = exported
        transfer.wait()
        self.residency.eviction.settle_exports()
        num_blocks, moving.num_arrived = len(computed.blocks), computed.num_tokens
        kv_transfer = m.KvTransfer("", 0, num_blocks, [], computed.num_tokens)
        target.add(moving.frames, moving.tokens, (slot, kv_transfer))

    def _count_again(self, moving: Moving, num_computed: int) -> None:
        """Count the tokens that an engine computed although their KV had come."""
        if moving.num_arrived is not None:
            num_new = num_computed - moving.num_arrived
            num_again = self._scheduled[moving.request_id] - num_new
            assert num_again >= 0
            self.figures.num_tokens_computed_again += num_again

    def _lose(self, name: str) -> None:
        """Drop all KV of an engine, as if the host had no room for the KV."""
        engine = self._engines[name]
        engine.kv.stop(Place.LEAVING)
        engine.kv.stop(Place.ARRIVING)
        engine.preempt()
        engine.kv.discard_dead()
        for moving in self.requests.values():
            if moving.engine == name:
                moving.num_arrived = None


def len_of(moving: Moving) -> int:
    """The number of tokens of a request, with its prompt."""
    return PROMPT_LENGTHS[int(moving.request_id.split("-")[-1])] + len(moving.tokens)


def prompts(name: str) -> dict[str, list[int]]:
    rng = random.Random(0)
    lists = [[rng.randrange(300, 1900) for _ in range(length)] for length in PROMPT_LENGTHS]
    return {f"{name}-{index}": prompt for index, prompt in enumerate(lists)}


def measure(
    engines: MovingEngines, *, is_alone: bool, has_chunks: bool, has_losses: bool
) -> Figures:
    """Compare answers that move with answers that stay; if ``is_alone``, one after another.

    With ``has_losses``, answers are moved a second time, and KV is lost on the way.
    """
    stayed = []
    for request_id, prompt in prompts("stays").items():
        asked = engines.ask({request_id: prompt})
        engines.finish(asked)
        stayed += asked
    engines.figures.distinct_tokens = [len(set(moving.tokens)) for moving in stayed]
    for kind, may_lose in (("moves", False), ("loses", True))[: 1 + has_losses]:
        together = prompts(kind)
        rounds = [{key: value} for key, value in together.items()] if is_alone else [together]
        for one in rounds:
            asked = engines.ask(one)
            engines.move_at_random(asked, has_chunks=has_chunks, may_lose=may_lose)
            for moving in asked:
                index = int(moving.request_id.split("-")[-1])
                if moving.tokens != stayed[index].tokens:
                    engines.figures.differing.append(moving.request_id)
    engines.close()
    return engines.figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room-mib", type=int, default=10, help="beside one file of weights")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--losses", action="store_true")
    args = parser.parse_args()
    engines = MovingEngines(args.path, args.dtype, args.room_mib << 20, args.seed)
    figures = measure(engines, is_alone=args.alone, has_chunks=args.chunks, has_losses=args.losses)
    print(json.dumps(asdict(figures)), flush=True)
    os._exit(0)  # a normal exit would spend seconds on the engines


if __name__ == "__main__":
    main()
