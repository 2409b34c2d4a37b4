"""The checks of a group of families: two workers on emulated devices beside vLLM alone.

All families of a group are loaded together in every process, so that their engines share the
device's memory and the turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.families.cells import Cell, Outcome
from benchmarks.families.plain import PlainVllm, VllmCannot
from benchmarks.families.table import Family
from benchmarks.families.workers import FamilyWorker
from gpupoold.checkpoints.tiny_tokenizer import VOCAB_SIZE
from gpupoold.wire.channel import ChannelClosed

# Lengths of prompts and answers in tokens. The last prompt is longer than every window, and its
# answer long enough to be interrupted.
_SIZES = ((20, 48), (80, 48), (150, 256))
_LONG = len(_SIZES) - 1
_NUM_TOKENS_BEFORE = 20
_NUM_TOKENS_BEFORE_KILL = 5
# Room on a device beside the largest model; less than the other models of a group together.
_KV_ROOM_BYTES = 5 << 20

Cells = dict[str, Cell]


def prompt_of(index: int) -> list[int]:
    """Return the token ids of a prompt."""
    rng = random.Random(index)
    return [rng.randrange(300, VOCAB_SIZE - 148) for _ in range(_SIZES[index][0])]


class GroupCheck:
    """The state of a group's checks; ``cells`` has the results by family."""

    def __init__(self, families: Sequence[Family], folder: Path, plain: PlainVllm) -> None:
        self.families = list(families)
        self.cells: dict[str, Cells] = {family.name: {} for family in families}
        self._paths = {family.name: folder / family.name for family in families}
        self._plain = plain
        self._expected: dict[tuple[str, int], list[int]] = {}

    def run(self, log_path: Path) -> None:
        """Fill the cells in.

        Raises:
            ChannelClosed: a worker died, so that some cells are missing.
        """
        self._ask_vllm()
        if not self.families:
            return
        with self._worker(0, log_path) as first:
            self._load_first(first)
            self._serve(first)
            self._switch(first)
            self._page_out(first)
            with self._worker(1, log_path) as second:
                self._load_second(first, second)
                second.meet(first)
                self._migrate(first, second)
                self._kill_and_resume(first, second)

    def _ask_vllm(self) -> None:
        """Get vLLM's answers; families that vLLM cannot run get their cells, and leave."""
        for family in list(self.families):
            try:
                self._plain.load(family.name, self._paths[family.name], family.dtype)
                for index, (_, num_tokens) in enumerate(_SIZES):
                    answer = self._plain.answer(family.name, prompt_of(index), num_tokens)
                    self._expected[family.name, index] = answer
            except VllmCannot as error:
                reason = " ".join(str(error).split())[:200]
                cannot = Cell(Outcome.VLLM_CANNOT, reason)
                self.cells[family.name] = {
                    "serve": cannot, "switch": cannot, "kv": cannot, "migrate": cannot,
                    "resume": cannot,
                }
                self.families.remove(family)

    @contextmanager
    def _worker(self, number: int, log_path: Path) -> Iterator[FamilyWorker]:
        sizes = [
            sum(file.stat().st_size for file in self._paths[family.name].glob("*.safetensors"))
            for family in self.families
        ]
        device_bytes = max(sizes) + _KV_ROOM_BYTES
        worker = FamilyWorker(number, device_bytes, log_path.with_suffix(f".worker-{number}"))
        try:
            yield worker
        finally:
            if worker.process.poll() is None:
                worker.process.terminate()
                worker.kill()

    def _load_first(self, worker: FamilyWorker) -> None:
        def load(family: Family) -> None:
            worker.load_family(family.name, self._paths[family.name], family.dtype, None)

        for family in list(self.families):
            problem = _problem_of(load, family)
            if problem is not None:
                self._set(family, "serve", problem)
                self.families.remove(family)

    def _serve(self, worker: FamilyWorker) -> None:
        """Ask every prompt alone."""

        def serve(family: Family) -> Cell:
            for index, (_, num_tokens) in enumerate(_SIZES):
                request_id = f"serve-{family.name}-{index}"
                worker.ask(family.name, request_id, prompt_of(index), max_tokens=num_tokens)
                self._compare(family, index, worker.finish(request_id))
            num_tokens = sum(num for _, num in _SIZES)
            return Cell(Outcome.YES, f"{num_tokens} tokens")

        for family in self.families:
            self._fill(family, "serve", serve)

    def _switch(self, worker: FamilyWorker) -> None:
        """Ask all prompts of all families at once, on a device that is too small for them.

        Families in bfloat16 get one prompt at a time, because other batches round differently.
        """
        worker.switches.clear()
        waiting = {
            family.name: [*range(_LONG)] * 2 if family.dtype == "bfloat16" else []
            for family in self.families
        }
        asked: dict[str, tuple[Family, int]] = {}

        def ask(family: Family, index: int) -> None:
            request_id = f"switch-{family.name}-{len(asked)}"
            asked[request_id] = family, index
            num_tokens = _SIZES[index][1]
            worker.ask(family.name, request_id, prompt_of(index), max_tokens=num_tokens)

        for family in self.families:
            first = waiting[family.name].pop() if waiting[family.name] else None
            for index in range(_LONG) if first is None else [first]:
                ask(family, index)
        while not set(asked) <= set(worker.ended):
            worker.pump(1.0)
            for request_id in [one for one in asked if one in worker.ended]:
                family, _ = asked[request_id]
                is_last = request_id == [one for one in asked if asked[one][0] is family][-1]
                if waiting[family.name] and is_last:
                    ask(family, waiting[family.name].pop())

        def compare(family: Family) -> Cell:
            for request_id, (owner, index) in asked.items():
                if owner is family:
                    self._compare(family, index, worker.finish(request_id))
            loads = [one for one in worker.switches if one.model == family.name and one.weight_bytes]
            assert loads, "the weights never left the device"
            return Cell(Outcome.YES, f"{len(loads)} loads of weights")

        for family in self.families:
            self._fill(family, "switch", compare)

    def _page_out(self, worker: FamilyWorker) -> None:
        """Move all of a model to the host in the middle of an answer."""

        def page_out(family: Family) -> Cell:
            name, request_id = family.name, f"kv-{family.name}"
            worker.ask(name, request_id, prompt_of(_LONG), max_tokens=_SIZES[_LONG][1])
            worker.wait_tokens(request_id, _NUM_TOKENS_BEFORE)
            calls: list[tuple[str, dict[str, Any]]] = [
                ("checksum", {"model": name}),
                ("page_out", {"model": name}),
                ("checksum", {"model": name}),
            ]
            before, moved, after = worker.call_many(calls)
            assert moved["kv_out_bytes"] > 0, "no KV was on the device"
            assert before == after, "the bytes changed"
            self._compare(family, _LONG, worker.finish(request_id))
            worker.call("check_integrity")
            return Cell(Outcome.YES, f"{moved['kv_out_bytes'] >> 10} KiB")

        for family in self.families:
            self._fill(family, "kv", page_out)

    def _load_second(self, first: FamilyWorker, second: FamilyWorker) -> None:
        """Load the second worker from the snapshots of the first."""

        def load(family: Family) -> None:
            problem = second.load_family(
                family.name, self._paths[family.name], family.dtype, first.snapshots[family.name]
            )
            if problem:
                self._set(family, "serve", Cell(Outcome.NO, problem))

        for family in list(self.families):
            problem = _problem_of(load, family)
            if problem is not None:
                self._set(family, "migrate", problem)
                self.families.remove(family)

    def _migrate(self, first: FamilyWorker, second: FamilyWorker) -> None:
        """Move an answer to the second worker."""

        def migrate(family: Family) -> Cell:
            name, request_id = family.name, f"move-{family.name}"
            num_tokens = _SIZES[_LONG][1]
            first.ask(name, request_id, prompt_of(_LONG), max_tokens=num_tokens)
            first.wait_tokens(request_id, _NUM_TOKENS_BEFORE)
            moved = first.release(name, request_id)
            num_blocks = second.receive(name, request_id, prompt_of(_LONG), num_tokens, moved)
            rest = second.finish(request_id)
            first.forget_transfer(moved)
            is_same = not num_blocks and family.dtype == "bfloat16"
            self._compare(family, _LONG, [*moved.tokens, *rest], len(moved.tokens) * is_same)
            return Cell(Outcome.YES, f"{num_blocks} blocks" if num_blocks else "computed anew")

        for family in self.families:
            self._fill(family, "migrate", migrate)

    def _kill_and_resume(self, first: FamilyWorker, second: FamilyWorker) -> None:
        """Kill the first worker while it answers for all families."""
        num_tokens = _SIZES[_LONG][1]
        before: dict[str, list[int]] = {}
        for family in self.families:
            request_id = f"resume-{family.name}"
            first.ask(family.name, request_id, prompt_of(_LONG), max_tokens=num_tokens)
        for family in self.families:
            first.wait_tokens(f"resume-{family.name}", _NUM_TOKENS_BEFORE_KILL)
        for family in self.families:
            before[family.name] = first.tokens[f"resume-{family.name}"]
        first.kill()

        def resume(family: Family) -> Cell:
            name, request_id, tokens = family.name, f"resume-{family.name}", before[family.name]
            assert len(tokens) < num_tokens, "the answer had ended before"
            second.ask(name, request_id, prompt_of(_LONG), tokens, max_tokens=num_tokens)
            rest = second.finish(request_id)
            is_same = family.dtype == "bfloat16"
            self._compare(family, _LONG, [*tokens, *rest], len(tokens) * is_same)
            return Cell(Outcome.YES, f"after {len(tokens)} tokens")

        for family in self.families:
            self._fill(family, "resume", resume)
        second.call("check_integrity")

    def _compare(
        self, family: Family, index: int, tokens: list[int], num_kept: int = 0
    ) -> None:
        """Compare an answer with vLLM's; after ``num_kept`` tokens vLLM prefills these too.

        Raises:
            AssertionError: they differ.
        """
        expected = self._expected[family.name, index]
        if num_kept:
            kept, num_left = expected[:num_kept], len(expected) - num_kept
            prompt = prompt_of(index) + kept
            expected = kept + self._plain.answer(family.name, prompt, num_left)
        pairs = zip(tokens, expected, strict=False)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        assert first is None, f"prompt {index}: token {first} of {len(expected)} differs"
        assert len(tokens) == len(expected), f"prompt {index}: {len(tokens)} of {len(expected)}"

    def _fill(self, family: Family, column: str, check: Callable[[Family], Cell]) -> None:
        found: list[Cell] = []
        problem = _problem_of(lambda one: found.append(check(one)), family)
        self._set(family, column, found[0] if problem is None else problem)

    def _set(self, family: Family, column: str, cell: Cell) -> None:
        """Set a cell; a failure stays."""
        old = self.cells[family.name].get(column)
        if old is None or old.outcome is Outcome.YES:
            self.cells[family.name][column] = cell


def _problem_of(check: Callable[[Family], None], family: Family) -> Cell | None:
    """Run a check; return the cell of its failure."""
    try:
        check(family)
    except ChannelClosed:
        raise
    except (AssertionError, TimeoutError, VllmCannot) as error:
        [said] = error.args[:1] or [error]
        text = getattr(said, "message", None) or str(said)
        return Cell(Outcome.NO, " ".join(text.split())[:300])
    return None
