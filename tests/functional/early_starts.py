"""One engine on a device with a link, of which the copies fail, or a layer reads too early.

``python -m tests.functional.early_starts CHECKPOINT`` prints :class:`Figures` as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpupoold.domain import ModelName
from gpupoold.memory.device import Copy
from gpupoold.memory.emulated import ModelledLink
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import PagePool
from gpupoold.system.activity import WORKER
from gpupoold.wire import messages as m
from gpupoold.worker.device import DriverMemory, open_device
from gpupoold.worker.engine.cpu_build import adapt_cpu_build
from gpupoold.worker.kv.page_eviction import Use
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.threads import TurnThread, finish
from gpupoold.worker.turns.loads import EngineLoader, KeptEngine
from gpupoold.worker.turns.self_check import first_self_check
from tests.functional.worker_peer import encode_request

_LINK_BYTES_PER_S = 200_000_000
_NUM_TOKENS = 6
PROMPT_LENGTHS = (5, 33, 200)


@dataclass
class Figures:
    """What happened, and what was wrong."""

    num_gates: int = 0
    num_layers: int = 0
    late_bytes: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    failure: str = ""
    failure_phase: int = 0
    num_outputs_after_failure: int = 0
    starts_early_with_early_reads: bool = True
    resident_after_early_reads: bool = False
    bytes_copied_on_return: int = 0
    num_gates_on_return: int = 0


class OneEngine:
    """A device with one engine, whose weights can be away."""

    def __init__(self, path: Path) -> None:
        adapt_cpu_build()
        torch.set_num_threads(1)
        num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        self.device = open_device(
            "emulated", 2 * num_bytes, 0, 0, link_bytes_per_s=_LINK_BYTES_PER_S
        )
        pool = PagePool(self.device.num_pages, self.device.table_pages)
        host = KvHostCache(64 << 20)
        self.residency = Residency(
            self.device, pool, host, _LINK_BYTES_PER_S, lambda _: Use(1, 0.0, 1.0, 0.0)
        )
        self.loader = EngineLoader(
            self.device, host, self.residency, TurnThread(), DriverMemory(self.device)
        )
        model = m.ModelToLoad(
            name=ModelName("a"), source="a", path=str(path), dtype="float32", max_model_len=512
        )
        self.order = m.LoadModel(model, profiling_budget_s=0.0)
        self.engine = self.loader.load(self.order, None, "a").engine
        self._num_asked = 0

    def answer(self, num_prompt_tokens: int, *, is_away: bool) -> tuple[list[int], int]:
        """Return the tokens for a prompt, and the bytes of weights that arrived in its step."""
        self._ask(num_prompt_tokens)
        if is_away:
            self.residency.page_out("a")
            record = self.residency.switch_in("a")
            late_bytes = record.late_weight_bytes if record is not None else 0
        else:
            self.residency.make_resident("a")
            late_bytes = 0
        tokens: list[int] = []
        while self.engine.has_requests():
            self.residency.advance("a")
            tokens += self.step()
        self.residency.check_integrity()
        return tokens, late_bytes

    def step(self) -> list[int]:
        """Run a step; return its tokens."""
        self.residency.ensure_kv("a")
        return [token for item in self.engine.step() for token in item.new_token_ids]

    def fail_after_start(self) -> tuple[str, int, int]:
        """Let the copies fail during a step; return the error, the phase, and further tokens."""
        self._ask(PROMPT_LENGTHS[-1])
        self.residency.page_out("a")
        links: Any = ModelledLink
        begin = links.begin

        def fail(link: ModelledLink, copies: Sequence[Copy]) -> float:
            raise OSError("the link is broken")

        self.residency.switch_in("a")
        num_tokens = 0
        links.begin = fail
        try:
            num_tokens += len(self.step())
        except OSError as error:
            return str(error), WORKER.main.phase, num_tokens
        finally:
            links.begin = begin
        return "", WORKER.main.phase, num_tokens

    def come_back(self) -> int:
        """Let the model lose its engine and get it again; return the bytes of weights copied."""
        snapshot = self.engine.weights.snapshot
        given = HostBuffer(os.dup(snapshot.fd), snapshot.num_bytes)
        grammars = self.loader.grammars_for(self.engine, self.order)
        assert grammars is not None
        self.residency.make_resident("a")
        self.residency.vacate("a")
        links: Any = ModelledLink
        begin, sizes = links.begin, list[int]()

        def count(link: ModelledLink, copies: Sequence[Copy]) -> float:
            sizes.extend(copy.num_bytes for copy in copies)
            arrival_s: float = begin(link, copies)
            return arrival_s

        links.begin = count
        try:
            self.loader.load(self.order, given, "a", kept=KeptEngine(self.engine, grammars))
        finally:
            links.begin = begin
        self.residency.check_integrity()
        return sum(sizes)

    def read_early(self) -> bool:
        """Let the first layer read the last; return whether the model may start early then."""
        layers = self.engine.runner.get_model().model.layers
        last = layers[-1].mlp.down_proj.weight

        def read(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            arguments[1].add_(0.0 * last[0, 0])

        hook = layers[0].register_forward_pre_hook(read)
        weights = self.engine.weights
        weights.start_bytes, self.engine.worker.gates = weights.num_bytes, None
        finish(first_self_check(self.engine, self.residency, self.device))
        hook.remove()
        return self.engine.worker.gates is not None or weights.start_bytes < weights.num_bytes

    def _ask(self, num_prompt_tokens: int) -> None:
        self._num_asked += 1
        prompt = [300 + 7 * index * index % 1500 for index in range(num_prompt_tokens)]
        name = f"request-{self._num_asked}"
        frames = encode_request(name, prompt, cache_salt=name, max_tokens=_NUM_TOKENS)
        self.engine.add(frames)


def run(path: Path) -> Figures:
    """Compare answers with and without an early start, then break things."""
    one, figures = OneEngine(path), Figures()
    gates = one.engine.worker.gates
    figures.num_gates = len(gates.gates) if gates is not None else 0
    figures.num_layers = one.engine.layers.num_layers
    for length in PROMPT_LENGTHS * 3:
        expected, _ = one.answer(length, is_away=False)
        tokens, late_bytes = one.answer(length, is_away=True)
        figures.late_bytes.append(late_bytes)
        if tokens != expected or len(tokens) != _NUM_TOKENS:
            figures.differing.append(length)
    figures.bytes_copied_on_return = one.come_back()
    returned = one.engine.worker.gates
    figures.num_gates_on_return = len(returned.gates) if returned is not None else 0
    one.residency.make_resident("a")
    figures.starts_early_with_early_reads = one.read_early()
    figures.resident_after_early_reads = one.engine.weights.is_resident
    if gates is not None:
        one.engine.worker.gates = gates
        one.engine.weights.start_bytes = one.engine.layer_ends[0]
        failure = one.fail_after_start()
        figures.failure, figures.failure_phase, figures.num_outputs_after_failure = failure
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    print(json.dumps(asdict(run(parser.parse_args().checkpoint))))
    os._exit(0)
