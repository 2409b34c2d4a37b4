"""Profiling on real paged memory; the engine is one whose steps take exactly known times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpupoold.errors import Failed
from gpupoold.latency.models import DecodeBatch, LinearDecode, LinearPrefill, PrefillModel, Profile
from gpupoold.memory.kv_extents import KvGeometry, KvRow, Place
from gpupoold.wire.messages import LoadedModel, RequestProgress
from gpupoold.worker.kv.page_eviction import Use
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.profiling import profile
from gpupoold.worker.threads import finish
from tests.unit.memory.rig import PAGE, Rig

BLOCK_TOKENS = 32
NUM_BLOCKS = 400
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
PREFILL = PrefillModel(64, 160, 1e-9, 1e-8, 0.002)
DECODE = LinearDecode(2e-7, 1e-4, 0.0015)


class KnownEngine:
    """Schedules as an engine does; a step takes what the laws say, in virtual time.

    A kind of step that is new to it takes three times as long, as if kernels had to be tuned.
    """

    prefixes = None

    def __init__(self, rig: Rig, *, slowness: float = 1.0, weight_pages: int = 4) -> None:
        self.now_s = 100.0
        self.slowness = slowness
        self.weights, _ = rig.weights(weight_pages, "known")
        geometry = KvGeometry(NUM_BLOCKS, PAGE, (KvRow(0, PAGE, PAGE),))
        self.kv, self.ledger = rig.kv(geometry)
        self.info = LoadedModel(
            name="known",
            architecture="Known",
            max_model_len=2048,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            num_gpu_blocks=NUM_BLOCKS,
            weight_bytes=weight_pages * PAGE,
            kv_bytes_per_token=PAGE // BLOCK_TOKENS,
            supported_tasks=("generate",),
        )
        self.max_batched_tokens = 2048
        self.max_sequences = 16
        self.max_tokens_each = 1
        self.num_steps = 0
        self.fail_at_step = -1
        self._seen: set[object] = set()
        self._waiting: dict[str, tuple[int, int]] = {}
        self._running: dict[str, tuple[int, int, list[int]]] = {}  # context, left, blocks

    @property
    def name(self) -> str:
        return self.info.name

    def add_synthetic(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        assert num_prompt_tokens + max_tokens <= self.info.max_model_len
        self._waiting[request_id] = num_prompt_tokens, max_tokens

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            if request_id in self._running:
                self.ledger.release(self._running.pop(request_id)[2])

    def is_ready(self) -> bool:
        return self.has_requests()

    def wanted_blocks(self) -> list[int]:
        return [block for _, _, blocks in self._running.values() for block in blocks]

    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def preempt(self) -> None:
        raise AssertionError("nothing has to be preempted")

    def num_missing_blocks(self) -> tuple[int, int]:
        wanted = sum(2 + tokens // BLOCK_TOKENS for tokens, _ in self._waiting.values())
        return max(0, wanted + 2 * len(self._running) - self.ledger.num_free), 0

    def step(self, chunk_tokens: int | None = None) -> list[RequestProgress]:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("kernel panic")
        decoding = list(self._running)
        limit = self.max_batched_tokens if chunk_tokens is None else chunk_tokens - len(decoding)
        starting = self._start(limit)
        prompts = [self._running[request_id][0] for request_id in starting]
        context = sum(self._running[request_id][0] for request_id in decoding)
        duration_s = PREFILL.predict_s(prompts)
        duration_s += DECODE.predict_s(DecodeBatch(len(decoding), context))
        kind = (tuple(prompts), len(decoding))
        self.now_s += duration_s * self.slowness * (1 if kind in self._seen else 3)
        self._seen.add(kind)
        many = [self._advance(request_id, self.max_tokens_each) for request_id in decoding]
        return many + [self._advance(request_id, 1) for request_id in starting]

    def begin_step(self) -> list[RequestProgress]:
        return self.step()

    def end_steps(self) -> list[RequestProgress]:
        return []

    def _start(self, budget: int) -> list[str]:
        started = []
        for request_id, (tokens, max_tokens) in list(self._waiting.items()):
            num_blocks = 1 + (tokens + max_tokens) // BLOCK_TOKENS
            if tokens > budget or num_blocks > self.ledger.num_free:
                break
            budget -= tokens
            del self._waiting[request_id]
            self._running[request_id] = tokens, max_tokens, self.ledger.allocate(num_blocks)
            self.ledger.remember(self._running[request_id][2][0], f"prefix of {request_id}")
            started.append(request_id)
        return started

    def _advance(self, request_id: str, num_tokens: int) -> RequestProgress:
        context, left, blocks = self._running[request_id]
        self._running[request_id] = context + num_tokens, left - num_tokens, blocks
        if left > num_tokens:
            return RequestProgress(request_id, [7] * num_tokens)
        self.ledger.release(self._running.pop(request_id)[2])
        if not self.info.generates:
            return RequestProgress(request_id, [], "stop", has_result=True)
        return RequestProgress(request_id, [7], "length")


class OverlappingEngine(KnownEngine):
    """Prepares a step in ``host_s`` while the step before is computed, if steps follow each other.

    Steps of different prompts do not overlap.
    """

    host_s = 0.0001
    _under_way: tuple[list[RequestProgress], float] | None = None  # and its end

    def step(self, chunk_tokens: int | None = None) -> list[RequestProgress]:
        assert self._under_way is None
        self.now_s += self.host_s
        return super().step(chunk_tokens)

    def begin_step(self) -> list[RequestProgress]:
        self.now_s += self.host_s
        began_s = self.now_s
        made = super().step()
        duration_s = self.now_s - began_s
        self.now_s = began_s
        starts_s = max(began_s, self._under_way[1]) if self._under_way else began_s
        before = self.end_steps()
        self._under_way = made, starts_s + duration_s
        return before

    def end_steps(self) -> list[RequestProgress]:
        made, ends_s = self._under_way or ([], self.now_s)
        self._under_way = None
        self.now_s = max(self.now_s, ends_s)
        return made


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(num_pages=500)
    yield made
    made.close()


@pytest.fixture
def residency(rig: Rig) -> Iterator[Residency]:
    made = Residency(rig.device, rig.pool, rig.host, 1e9, lambda _: Use(0, 0.0, 10.0, 0.0))
    yield made
    made.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def run(residency: Residency, checkpoint: Path) -> Callable[[KnownEngine, float], Profile | None]:
    def measure(engine: Any, budget_s: float = 3.0) -> Profile | None:
        residency.add(engine)
        return finish(profile(engine, residency, budget_s, str(checkpoint), lambda: engine.now_s))

    return measure


Run = Callable[..., Profile | None]


def assert_no_trace(engine: KnownEngine) -> None:
    """All blocks are held back again, without content; the engine has nothing to do."""
    assert not engine.has_requests()
    assert engine.kv.index.extents(Place.UNMAPPED) == list(range(engine.kv.geometry.num_extents))
    assert engine.ledger.cached() == {}
    assert engine.kv.resident_bytes == 0


def test_known_constants_are_found_again(rig: Rig, run: Run) -> None:
    engine = KnownEngine(rig)
    found = run(engine)
    assert found is not None
    assert found.problem == ""
    assert found.prefill is not None
    assert found.decode is not None
    assert found.prefill.prefill_law().constants == pytest.approx(PREFILL.constants, rel=1e-6)
    assert found.decode.decode_law().constants == pytest.approx(DECODE.constants, rel=1e-6)
    assert min(found.prefill.r_squared, found.decode.r_squared) > 0.999999
    assert found.decode.num_points >= 9
    assert found.duration_s < 3.0
    assert_no_trace(engine)


def test_overlapping_steps_are_timed_as_in_a_turn(rig: Rig, run: Run) -> None:
    engine = OverlappingEngine(rig)
    found = run(engine)
    assert found is not None
    assert found.problem == ""
    assert found.decode is not None
    assert found.decode.decode_law().constants == pytest.approx(DECODE.constants, rel=1e-6)
    assert_no_trace(engine)


def test_a_step_lasts_as_long_as_the_host_needs_to_prepare_it(rig: Rig, run: Run) -> None:
    engine = OverlappingEngine(rig)
    engine.host_s = 0.05  # more than any step takes
    found = run(engine, 60.0)
    assert found is not None
    assert found.decode is not None
    assert found.decode.decode_law().predict_s(DecodeBatch(8, 2000)) == pytest.approx(0.05)


def test_weights_stay_and_other_models_give_way(rig: Rig, residency: Residency, run: Run) -> None:
    other: Any = KnownEngine(rig, weight_pages=490)
    engine = KnownEngine(rig)
    other.info = replace(engine.info, name="other")
    residency.add(other)
    residency.switch_in("other")
    found = run(engine)
    assert found is not None
    assert found.problem == ""
    assert engine.weights.is_resident
    assert not other.weights.is_resident
    residency.check_integrity()


@pytest.mark.parametrize("slowness", [1.0, 10.0, 30.0, 100.0, 1000.0])
def test_a_slow_model_gets_fewer_points_not_more_time(rig: Rig, run: Run, slowness: float) -> None:
    engine = KnownEngine(rig, slowness=slowness)
    found = run(engine, 1.0)
    assert found is not None
    # The first step cannot be foreseen: nobody knows how slow the model is.
    unforeseen_s = 4 * slowness * PREFILL.predict_s([16])
    assert found.duration_s < 1.0 + unforeseen_s
    if slowness >= 100:
        assert found.prefill is None
        assert found.decode is None
        assert "prefill: only" in found.problem
    assert_no_trace(engine)


def test_no_budget_means_no_step(rig: Rig, run: Run) -> None:
    engine = KnownEngine(rig)
    assert run(engine, 0.0) is None
    assert engine.num_steps == 0
    assert not engine.weights.is_resident


@pytest.mark.parametrize("step", [1, 9, 60])
def test_a_step_that_fails_fails_the_model(rig: Rig, run: Run, step: int) -> None:
    """A user's request would fail in the same way."""
    engine = KnownEngine(rig)
    engine.fail_at_step = step
    with pytest.raises(Failed, match=r"known: the engine failed while .* timed: kernel panic"):
        run(engine)


def test_a_model_that_does_not_fit_is_reported(rig: Rig, run: Run) -> None:
    engine = KnownEngine(rig, weight_pages=rig.pool.num_pages + 1)
    found = run(engine)
    assert found is not None
    assert found.problem
    assert (found.prefill, found.decode) == (None, None)


def test_a_pooling_model_only_prefills(rig: Rig, run: Run) -> None:
    engine = KnownEngine(rig)
    engine.info = replace(engine.info, supported_tasks=("embed",))
    found = run(engine)
    assert found is not None
    assert found.problem == ""
    assert found.prefill is not None
    assert found.prefill.prefill_law().predict_s([512]) == pytest.approx(PREFILL.predict_s([512]))
    assert found.decode is not None
    assert found.decode.decode_law().predict_s(DecodeBatch(8, 4096)) == 0.0
    assert_no_trace(engine)


@pytest.mark.parametrize("config", ["", "{", '{"hidden_size": 64}', '{"kv_lora_rank": 8}'])
def test_unknown_dimensions_leave_the_straight_line(
    rig: Rig, run: Run, checkpoint: Path, config: str
) -> None:
    (checkpoint / "config.json").write_text(config)
    found = run(KnownEngine(rig))
    assert found is not None
    assert found.prefill is not None
    assert isinstance(found.prefill.prefill_law(), LinearPrefill)
    assert found.problem == ""


def test_answers_that_gain_whole_drafts_last_as_long_as_others(rig: Rig, run: Run) -> None:
    engine = KnownEngine(rig)
    engine.max_tokens_each = 4
    found = run(engine)
    assert found is not None
    assert found.problem == ""
    assert found.decode is not None
    # With room for as many steps as without drafts; else answers end before the batch has grown.
    assert found.decode.num_points == 12
    assert_no_trace(engine)


@pytest.mark.parametrize(
    ("max_model_len", "max_batched_tokens", "max_sequences"),
    [(2048, 64, 16), (256, 2048, 16), (128, 2048, 4), (2048, 2048, 1)],
)
def test_small_limits_are_kept(
    rig: Rig, run: Run, max_model_len: int, max_batched_tokens: int, max_sequences: int
) -> None:
    engine = KnownEngine(rig)
    engine.info = replace(engine.info, max_model_len=max_model_len)
    engine.max_batched_tokens, engine.max_sequences = max_batched_tokens, max_sequences
    found = run(engine)
    assert found is not None
    for fit in (found.prefill, found.decode):
        assert fit is None or min(fit.constants) >= 0
    # What is missing is named, and nothing else.
    assert (found.prefill is None) == ("prefill:" in found.problem)
    assert (found.decode is None) == ("decode:" in found.problem)
    assert_no_trace(engine)


def test_slices_beside_streams_leave_long_steps_out(
    residency: Residency, rig: Rig, checkpoint: Path
) -> None:
    """A slice is one step of at most the limit; time between two slices does not count."""
    engine: Any = KnownEngine(rig)
    limit_s = 0.006
    residency.add(engine)
    slices = profile(
        engine, residency, 3.0, str(checkpoint), lambda: engine.now_s, slice_limit_s=lambda: limit_s
    )
    longest_s = 0.0
    while True:
        before_s = engine.now_s
        try:
            next(slices)
        except StopIteration as end:
            measured = end.value
            break
        longest_s = max(longest_s, engine.now_s - before_s)
        engine.now_s += 10.0  # steps of other models
    assert measured is not None
    assert measured.duration_s < 3.0
    assert longest_s < 4 * limit_s, "a new kind of step takes three times as long"
    assert measured.prefill is not None
    assert measured.prefill.num_points >= 5
    assert_no_trace(engine)
