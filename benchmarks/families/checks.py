"""The checks of a group of families: two workers on emulated devices beside vLLM alone.

All families of a group are loaded together in every process, so that their engines share the
device's memory and the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.families.cells import COLUMNS, Cell, Outcome
from benchmarks.families.family import Family
from benchmarks.families.plain import PlainVllm
from benchmarks.families.problems import problem_of
from benchmarks.families.prompts import LONG, SIZES, WITH_IMAGE, Prompt, decoded_features, prompt_of
from benchmarks.families.workers import FamilyWorker
from tests.support.tiny_vision import VISION_FAMILIES

_ENCODER_BYTES = 2 << 20  # kept free for the outputs of an image encoder
_MAX_ATTEMPTS = 4  # to have requests of all families running
_MAX_SWITCH_REQUESTS = 120  # of a group under memory pressure
_TOLERANCE = 1e-5  # of the numbers of pooling models
_NUM_ROUNDS = 2  # of all prompts, under memory pressure
_NUM_TOKENS_BEFORE = 20
_NUM_TOKENS_BEFORE_KILL = 5
# Room on a device beside the largest model; less than the other models of a group together.
_KV_ROOM_BYTES = 6 << 20

Cells = dict[str, Cell]


class GroupCheck:
    """The state of a group's checks; ``cells`` has the results by family."""

    def __init__(
        self, families: Mapping[Family, Path], plain: PlainVllm, num_gpus: int = 1
    ) -> None:
        self.families = list(families)
        self.cells: dict[str, Cells] = {family.name: {} for family in families}
        self._paths = {family.name: path for family, path in families.items()}
        self._plain = plain
        self._num_gpus = num_gpus
        self._expected: dict[tuple[str, int], list[int]] = {}
        self._numbers: dict[str, list[float]] = {}
        self._weight_bytes: dict[str, int] = {}  # of loaded families
        self._prompts: dict[tuple[str, int], Prompt] = {}  # with images
        # Families whose tokens depend on the batch in vLLM too: these get one request at a time.
        self._alone: set[str] = set()
        self._notes: dict[str, str] = {}

    def run(self, log_path: Path) -> None:
        """Fill the cells in.

        Raises:
            ChannelClosed: a worker died, so that some cells are missing.
        """
        self._ask_vllm()
        if not self.families:
            return
        if self._has_estimates:
            with self._worker(0, log_path) as sample:
                self._load_first(sample)
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
            problem = problem_of(self._get_answers, family)
            if problem is None:
                continue
            # Of states at block boundaries vLLM's CPU kernels of Mamba 2 have none.
            self._notes[family.name] = "vLLM alone without prefix cache"
            again = problem_of(
                lambda one: self._get_answers(one, enable_prefix_caching=False), family
            )
            if again is not None:
                cannot = Cell(Outcome.VLLM_CANNOT, problem.text)
                self.cells[family.name] = dict.fromkeys(COLUMNS[:-1], cannot)
                self.families.remove(family)

    def _get_answers(self, family: Family, **options: Any) -> None:
        name = family.name
        options |= {"max_model_len": family.max_model_len}
        if drafts := family.speculative_config(self._paths[name]):
            options["speculative_config"] = drafts
        self._plain.load(name, self._paths[name], family.dtype, **options)
        if not family.generates:
            self._numbers[name] = self._plain.pool(name, prompt_of(LONG), family.task)
            return
        for index, (_, num_tokens) in enumerate(SIZES):
            if family.task == "vision" and index in WITH_IMAGE:
                text = VISION_FAMILIES[family.maker].image_text
                prompt = self._plain.with_image(name, prompt_of(index), text, seed=index)
                self._prompts[name, index] = prompt
            prompt = self._prompt(family, index)
            self._expected[name, index] = self._plain.answer(name, prompt, num_tokens)
        shorter = range(LONG)
        prompts = [self._prompt(family, index) for index in shorter]
        together = self._plain.answers(name, prompts, SIZES[0][1])
        is_same = together == [self._expected[name, index] for index in shorter]
        if not is_same or family.dtype == "bfloat16":  # few tokens may be the same by chance
            self._notes.setdefault(name, "one request at a time")
            if name not in self._alone:
                # The prefix cache divides prompts otherwise, which rounds otherwise too.
                self._alone.add(name)
                self._get_answers(family, enable_prefix_caching=False)

    def _prompt(self, family: Family, index: int) -> Prompt:
        return self._prompts.get((family.name, index)) or prompt_of(index)

    @property
    def _has_estimates(self) -> bool:
        """True if only a load shows how large weights become, so that a device would be too large
        for switches.
        """
        return any(family.weight_growth > 1 for family in self.families)

    @contextmanager
    def _worker(self, number: int, log_path: Path) -> Iterator[FamilyWorker]:
        sizes = [
            self._weight_bytes.get(family.name)
            or family.weight_growth
            * sum(file.stat().st_size for file in self._paths[family.name].glob("*.safetensors"))
            for family in self.families
        ]
        has_images = any(family.task == "vision" for family in self.families)
        is_latent = any(family.mechanism == "MLA" for family in self.families)
        room_bytes = _KV_ROOM_BYTES + has_images * _ENCODER_BYTES
        room_bytes *= self._num_gpus if is_latent else 1  # each GPU has the complete latent KV
        device_bytes = int(max(sizes)) + room_bytes
        log_path = log_path.with_suffix(f".worker-{number}")
        worker = FamilyWorker(number, device_bytes, log_path, self._num_gpus)
        try:
            yield worker
        finally:
            if worker.process.poll() is None:
                worker.kill()

    def _load_first(self, worker: FamilyWorker) -> None:
        def load(family: Family) -> None:
            loaded = worker.load_family(family, self._paths[family.name], None)
            self._weight_bytes[family.name] = loaded.model.weight_bytes

        for family in list(self.families):
            problem = problem_of(load, family)
            if problem is not None:
                self._set(family, "serve", problem)
                self.families.remove(family)

    def _serve(self, worker: FamilyWorker) -> None:
        """Ask every prompt alone."""

        def serve(family: Family) -> Cell:
            if not family.generates:
                return self._pool(worker, family, "serve")
            for index in range(len(SIZES)):
                request_id = f"serve-{family.name}-{index}"
                self._ask(worker, family, request_id, index)
                self._compare(family, index, worker.finish(request_id))
            return Cell(Outcome.YES, self._notes.get(family.name, ""))

        for family in self.families:
            self._fill(family, "serve", serve)

    def _switch(self, worker: FamilyWorker) -> None:
        """Ask all prompts of all families at once, on a device that is too small for them.

        Families whose tokens depend on the batch get one prompt at a time.
        """
        worker.switches.clear()
        together = [*range(len(SIZES))] * _NUM_ROUNDS
        waiting = {
            family.name: list(together) if family.name in self._alone else []
            for family in self.families
        }
        asked: dict[str, tuple[Family, int]] = {}

        def ask(family: Family, index: int) -> None:
            request_id = f"switch-{family.name}-{len(asked)}"
            asked[request_id] = family, index
            self._ask(worker, family, request_id, index)

        for family in self._generating:
            for index in [waiting[family.name].pop()] if waiting[family.name] else together:
                ask(family, index)
        while not set(asked) <= set(worker.ended):
            worker.pump(1.0)
            for request_id in [one for one in asked if one in worker.ended]:
                family, _ = asked[request_id]
                is_last = request_id == [one for one in asked if asked[one][0] is family][-1]
                if waiting[family.name] and is_last:
                    ask(family, waiting[family.name].pop())
            has_missing = not all(worker.num_loads(family.name) for family in self._generating)
            is_over = set(asked) <= set(worker.ended)
            if is_over and has_missing and len(asked) < _MAX_SWITCH_REQUESTS:
                # Again, all at once, until the weights of every family have left the device.
                for family in self._generating:
                    ask(family, LONG)

        def compare(family: Family) -> Cell:
            if not family.generates:
                worker.call("page_out", model=family.name)
                return self._pool(worker, family, "switch")
            for request_id, (owner, index) in asked.items():
                if owner is family:
                    self._compare(family, index, worker.finish(request_id))
            num_loads = worker.num_loads(family.name)
            assert num_loads, "the weights never left the device"
            return Cell(Outcome.YES, f"{num_loads} loads of weights")

        for family in self.families:
            self._fill(family, "switch", compare)

    def _page_out(self, worker: FamilyWorker) -> None:
        """Move all of a model to the host in the middle of an answer."""

        def page_out(family: Family) -> Cell:
            name, request_id = family.name, f"kv-{family.name}"
            self._ask(worker, family, request_id, LONG)
            worker.wait_tokens(request_id, _NUM_TOKENS_BEFORE)
            calls: list[tuple[str, dict[str, Any]]] = [
                ("checksum", {"model": name}),
                ("page_out", {"model": name}),
                ("checksum", {"model": name}),
            ]
            before, moved, after = worker.call_many(calls)
            assert moved["kv_out_bytes"] > 0, "no KV was on the device"
            assert before == after, "the bytes changed"
            self._compare(family, LONG, worker.finish(request_id))
            worker.call("check_integrity")
            return Cell(Outcome.YES, f"{moved['kv_out_bytes'] >> 10} KiB")

        for family in self._generating:
            self._fill(family, "kv", page_out)

    def _load_second(self, first: FamilyWorker, second: FamilyWorker) -> None:
        """Load the second worker from the snapshots of the first."""

        def load(family: Family) -> None:
            snapshot = first.snapshots[family.name]
            loaded = second.load_family(family, self._paths[family.name], snapshot)
            if loaded.snapshot_problem:
                self._set(family, "serve", Cell(Outcome.NO, loaded.snapshot_problem))

        for family in list(self.families):
            problem = problem_of(load, family)
            if problem is not None:
                self._set(family, "migrate", problem)
                self.families.remove(family)

    def _migrate(self, first: FamilyWorker, second: FamilyWorker) -> None:
        """Move an answer to the second worker."""

        def migrate(family: Family) -> Cell:
            name, request_id = family.name, f"move-{family.name}"
            num_tokens = SIZES[LONG][1]
            self._ask(first, family, request_id, LONG)
            first.wait_tokens(request_id, _NUM_TOKENS_BEFORE)
            moved = first.release(name, request_id)
            num_blocks = second.receive(
                name,
                request_id,
                self._prompt(family, LONG),
                num_tokens,
                moved,
                self._salt(family, request_id),
            )
            rest = second.finish(request_id)
            first.forget_transfer(moved)
            is_prefilled = not num_blocks and name in self._alone
            self._compare(family, LONG, [*moved.tokens, *rest], len(moved.tokens) * is_prefilled)
            return Cell(Outcome.YES, f"{num_blocks} blocks" if num_blocks else "computed anew")

        for family in self._generating:
            self._fill(family, "migrate", migrate)

    def _kill_and_resume(self, first: FamilyWorker, second: FamilyWorker) -> None:
        """Kill the first worker while it answers for all families."""
        num_tokens = SIZES[LONG][1]
        before = {name: first.tokens[one] for name, one in self._ask_all(first).items()}
        first.kill(rank=self._num_gpus - 1)

        def resume(family: Family) -> Cell:
            if not family.generates:
                return self._pool(second, family, "resume")
            name, request_id, tokens = family.name, f"resume-{family.name}", before[family.name]
            assert len(tokens) < num_tokens, "the answer had ended before"
            self._ask(second, family, request_id, LONG, tokens)
            rest = second.finish(request_id)
            is_prefilled = name in self._alone
            self._compare(family, LONG, [*tokens, *rest], len(tokens) * is_prefilled)
            return Cell(Outcome.YES, f"after {len(tokens)} tokens")

        for family in self.families:
            self._fill(family, "resume", resume)
        second.call("check_integrity")

    def _ask_all(self, worker: FamilyWorker) -> dict[str, str]:
        """Return a request of each family, all of which have begun to answer.

        A request that has ended before the others began is asked again.
        """
        ids: dict[str, str] = {}
        for attempt in range(_MAX_ATTEMPTS):
            missing = [
                one for one in self._generating if ids.get(one.name) in (None, *worker.ended)
            ]
            for family in missing:
                ids[family.name] = f"resume-{family.name}-{attempt}"
                self._ask(worker, family, ids[family.name], LONG)
            for family in missing:
                worker.wait_tokens(ids[family.name], _NUM_TOKENS_BEFORE_KILL)
        return ids

    @property
    def _generating(self) -> list[Family]:
        return [family for family in self.families if family.generates]

    def _pool(self, worker: FamilyWorker, family: Family, prefix: str) -> Cell:
        """Compare the numbers of a pooling model with vLLM's.

        Raises:
            AssertionError: they differ.
        """
        request_id = f"{prefix}-{family.name}"
        numbers = worker.pool(family.name, request_id, prompt_of(LONG).token_ids, family.task)
        expected = self._numbers[family.name]
        assert len(numbers) == len(expected), f"{len(numbers)} numbers of {len(expected)}"
        largest = max(abs(one - other) for one, other in zip(numbers, expected, strict=True))
        assert largest < _TOLERANCE, f"a number differs by {largest:.2g}"
        return Cell(Outcome.YES, f"{len(numbers)} numbers")

    def _compare(self, family: Family, index: int, tokens: list[int], num_kept: int = 0) -> None:
        """Compare an answer with vLLM's; after ``num_kept`` tokens vLLM prefills these too.

        Raises:
            AssertionError: they differ.
        """
        expected = self._expected[family.name, index]
        if num_kept:
            kept, num_left = expected[:num_kept], len(expected) - num_kept
            prompt = self._prompt(family, index).followed_by(kept)
            expected = kept + self._plain.answer(family.name, prompt, num_left)
        pairs = zip(tokens, expected, strict=False)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        after = f", after {num_kept}" if num_kept else ""
        assert first is None, f"prompt {index}: token {first} of {len(expected)} differs{after}"
        assert len(tokens) == len(expected), f"prompt {index}: {len(tokens)} of {len(expected)}"

    def _ask(
        self,
        worker: FamilyWorker,
        family: Family,
        request_id: str,
        index: int,
        tokens: Sequence[int] = (),
    ) -> None:
        """Ask a prompt, or the rest of its answer after ``tokens``."""
        prompt = self._prompt(family, index)
        worker.ask(
            family.name,
            request_id,
            prompt.token_ids,
            tokens,
            self._salt(family, request_id),
            mm_features=decoded_features(prompt.features),
            max_tokens=SIZES[index][1],
        )

    def _salt(self, family: Family, request_id: str) -> str | None:
        """Return a salt against prefixes of others, if numbers depend on the batch."""
        return request_id if family.name in self._alone else None

    def _fill(self, family: Family, column: str, check: Callable[[Family], Cell]) -> None:
        found: list[Cell] = []
        problem = problem_of(lambda one: found.append(check(one)), family)
        self._set(family, column, found[0] if problem is None else problem)

    def _set(self, family: Family, column: str, cell: Cell) -> None:
        """Set a cell; a failure stays."""
        old = self.cells[family.name].get(column)
        if old is None or old.outcome is Outcome.YES:
            self.cells[family.name][column] = cell
