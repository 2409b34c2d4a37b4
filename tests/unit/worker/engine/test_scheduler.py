"""What vLLM's scheduler is told beside its own: tokens of a step, who may run, whose KV is here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.v1.core.sched.scheduler import Scheduler

from gpupoold.wire.messages import DraftCounts
from gpupoold.worker.engine.scheduler import PooledScheduler

LIMIT = 512


class Kv:
    """KV memory of which these blocks are away."""

    def __init__(self) -> None:
        self.away: set[int] = set()

    @property
    def is_whole(self) -> bool:
        return not self.away

    def is_on_device(self, blocks: list[int]) -> bool:
        return not self.away & set(blocks)


def request(name: str = "r", num_tokens: int = 40, num_computed: int = 40) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=num_tokens, num_computed_tokens=num_computed, status=None
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits under which vLLM has planned its steps."""
    limits: list[int] = []

    def schedule(scheduler: PooledScheduler) -> Any:
        limits.append(scheduler.max_num_scheduled_tokens)
        return SimpleNamespace(num_scheduled_tokens={})

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    return limits


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> PooledScheduler:
    """As vLLM makes it, without an engine."""
    monkeypatch.setattr(Scheduler, "__init__", lambda *_: None)
    made: Any = PooledScheduler()
    made.max_num_scheduled_tokens = LIMIT
    made.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)
    made.max_num_running_reqs = made.max_num_active_reqs = 8
    made.num_spec_tokens = made.num_lookahead_tokens = 0
    made.running, made.waiting, made.kv_holding_waiting = [], [], deque()
    made.requests, made.kv, made.lora_config = {}, Kv(), None
    owned = {"r": [3, 5, 8]}
    made.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: (owned.get(name, []),))
    scheduler: PooledScheduler = made
    return scheduler


@pytest.fixture
def ran(scheduler: PooledScheduler, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the requests that vLLM plans a step with, of all running ones."""
    planned: list[str] = []

    def schedule(scheduler: PooledScheduler) -> Any:
        planned[:] = [one.request_id for one in scheduler.running]
        return SimpleNamespace(num_scheduled_tokens={})

    monkeypatch.setattr(Scheduler, "schedule", schedule)

    def run(*running: Any) -> list[str]:
        scheduler.running = list(running)
        scheduler.schedule()
        assert scheduler.running == list(running)
        assert scheduler.max_num_running_reqs == 8
        return planned

    return run


class TestChunks:
    def test_prompts_with_log_probabilities_are_computed_in_short_steps(
        self, scheduler: PooledScheduler, steps: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            Scheduler, "add_request", lambda self, one: self.requests.update({one.request_id: one})
        )
        scheduler.max_num_scheduled_tokens = 4096
        scored = request("scored", 2000, 0)
        scored.num_prompt_tokens = 2000
        scored.sampling_params = SimpleNamespace(prompt_logprobs=0)
        plain = request("plain", 2000, 0)
        plain.sampling_params = SimpleNamespace(prompt_logprobs=None)
        scheduler.add_request(plain)
        scheduler.schedule()
        scheduler.add_request(scored)
        for scored.num_computed_tokens in (0, 512, 2000, 2001):
            scheduler.schedule()
        assert steps == [4096, 512, 512, 4096, 4096]

    @pytest.mark.parametrize(
        ("chunk_tokens", "num_running", "limit"),
        [
            (None, 3, LIMIT),
            (128, 3, 128),
            (2 * LIMIT, 3, LIMIT),
            (1, 3, 4),  # every answer goes on, and so does a prompt
            (0, 0, 1),
        ],
    )
    def test_a_step_has_so_many_tokens(
        self,
        scheduler: PooledScheduler,
        steps: list[int],
        chunk_tokens: int | None,
        num_running: int,
        limit: int,
    ) -> None:
        scheduler.running = [request(str(number)) for number in range(num_running)]
        scheduler.chunk_tokens = chunk_tokens
        scheduler.schedule()
        assert steps == [limit]
        assert scheduler.max_num_scheduled_tokens == LIMIT
        scheduler.chunk_tokens = None
        scheduler.schedule()
        assert steps == [limit, LIMIT]

    def test_a_step_has_room_for_every_draft(
        self, scheduler: PooledScheduler, steps: list[int]
    ) -> None:
        scheduler.num_spec_tokens = 4
        scheduler.running = [request(str(number)) for number in range(3)]
        scheduler.chunk_tokens = 1
        scheduler.schedule()
        assert steps == [16]

    def test_whole_prompts_are_not_cut(self, scheduler: PooledScheduler, steps: list[int]) -> None:
        scheduler.scheduler_config.enable_chunked_prefill = False
        scheduler.chunk_tokens = 128
        scheduler.schedule()
        assert steps == [LIMIT]

    def test_a_step_that_fails_leaves_the_limit(
        self, scheduler: PooledScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(Scheduler, "schedule", fail)
        scheduler.chunk_tokens = 10
        with pytest.raises(MemoryError):
            scheduler.schedule()
        assert scheduler.max_num_scheduled_tokens == LIMIT


class TestAdapters:
    """``max_loras`` is vLLM's limit of different adapters in one step."""

    def of(self, name: str, number: int | None) -> Any:
        made = request(name)
        made.lora_request = None if number is None else SimpleNamespace(lora_int_id=number)
        return made

    def test_the_newest_wait_for_a_slot(
        self, scheduler: PooledScheduler, ran: Callable[..., list[str]]
    ) -> None:
        scheduler.lora_config = SimpleNamespace(max_loras=2)  # type: ignore[assignment]
        running = [
            self.of(name, number)
            for name, number in (("a", 1), ("b", 2), ("c", 3), ("d", None), ("e", 1), ("f", 3))
        ]
        assert ran(*running) == ["a", "b", "d", "e"]
        assert ran(*running[1:]) == ["b", "c", "d", "f"]

    def test_a_request_that_sits_out_needs_no_slot(
        self, scheduler: PooledScheduler, ran: Callable[..., list[str]]
    ) -> None:
        scheduler.lora_config = SimpleNamespace(max_loras=1)  # type: ignore[assignment]
        away, here = self.of("r", 1), self.of("q", 2)
        assert ran(away, here) == ["r"]
        assert isinstance(scheduler.kv, Kv)
        scheduler.kv.away = {5}
        assert ran(away, here) == ["q"]


class TestGrammars:
    def test_requests_with_costly_grammars_sit_out(
        self, scheduler: PooledScheduler, ran: Callable[..., list[str]]
    ) -> None:
        """Only the requests that could run otherwise take turns."""
        asked: list[list[str]] = []

        def put_off(requests: Iterable[Any]) -> set[str]:
            asked.append([one.request_id for one in requests])
            return {"b"} & {*asked[-1]}

        scheduler.grammars = SimpleNamespace(put_off=put_off)  # type: ignore[assignment]
        running = [request(name) for name in ("a", "b", "r")]
        assert ran(*running) == ["a", "r"]
        assert isinstance(scheduler.kv, Kv)
        scheduler.kv.away = {5}
        assert ran(*running) == ["a"]
        assert asked == [["a", "b", "r"], ["a", "b"]]


class TestSteps:
    def test_nothing_is_begun_while_it_is_held(
        self, scheduler: PooledScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Scheduler, "has_requests", lambda _: True)
        scheduler.is_held = True
        assert not scheduler.has_requests()
        scheduler.is_held = False
        assert scheduler.has_requests()

    @pytest.mark.parametrize(
        ("tokens", "drafts", "new", "is_decode"),
        [
            ({"r": 1, "q": 1}, {}, [], True),
            ({"r": 1, "q": 5}, {}, [], False),
            ({"r": 1, "q": 5}, {"q": [7, 7, 7, 7]}, [], True),
            ({"r": 3, "q": 5}, {"q": [7, 7, 7, 7]}, [], False),
            ({"r": 1}, {}, ["r"], False),
            ({}, {}, [], False),
        ],
    )
    def test_steps_of_next_tokens_are_told_from_prompts(
        self,
        scheduler: PooledScheduler,
        monkeypatch: pytest.MonkeyPatch,
        tokens: dict[str, int],
        drafts: dict[str, list[int]],
        new: list[str],
        is_decode: bool,
    ) -> None:
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {})
        planned: Any = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=new,
            scheduled_spec_decode_tokens=drafts,
        )
        scheduler.update_from_output(planned, None)
        assert (scheduler.num_updates, scheduler.was_decode) == (1, is_decode)

    def test_drafts_are_counted_without_invalid_tokens(self, scheduler: PooledScheduler) -> None:
        assert scheduler.take_drafts() is None
        for accepted, invalid in ((2, {}), (0, {"r": 1}), (0, {"r": 4})):
            assert scheduler.make_spec_decoding_stats(None, 4, accepted, invalid, "r") is None
        assert scheduler.take_drafts() == DraftCounts(2, 7, 2)
        assert scheduler.take_drafts() is None


class TestIsolation:
    """Who may be in each of the next steps."""

    @pytest.fixture
    def may_run(self, scheduler: PooledScheduler) -> Callable[..., str]:
        """The requests of the next step."""
        made: Any = scheduler
        made.requests = {name: request(name) for name in "abc"}

        def choose(*, may_isolate: bool = True) -> str:
            scheduler.take_turns(may_isolate=may_isolate)
            return "".join(name for name in made.requests if scheduler._may_run(request(name)))

        return choose

    def test_isolated_requests_and_the_others_take_turns(
        self, scheduler: PooledScheduler, may_run: Callable[..., str]
    ) -> None:
        assert may_run() == "abc"
        scheduler.isolate("b")
        assert [may_run() for _ in range(4)] == ["b", "ac", "b", "ac"]
        scheduler.isolate("a")
        assert [may_run() for _ in range(4)] == ["b", "c", "a", "c"]
        scheduler.end_isolation("b")
        assert [may_run() for _ in range(3)] == ["a", "bc", "a"]
        scheduler.end_isolation("a")
        assert may_run() == "abc"

    def test_isolated_requests_that_are_all_there_are(
        self, scheduler: PooledScheduler, may_run: Callable[..., str]
    ) -> None:
        for name in "abc":
            scheduler.isolate(name)
        assert [may_run() for _ in range(4)] == ["a", "b", "c", "a"]

    def test_one_that_has_ended_is_forgotten(
        self, scheduler: PooledScheduler, may_run: Callable[..., str]
    ) -> None:
        scheduler.isolate("b")
        scheduler.isolate("gone")
        assert may_run() == "b"
        made: Any = scheduler
        del made.requests["b"]
        assert may_run() == "ac"
        assert not scheduler.isolated

    def test_it_waits_for_other_threads_but_not_for_ever(
        self, scheduler: PooledScheduler, may_run: Callable[..., str]
    ) -> None:
        now_s = 100.0
        scheduler.clock = lambda: now_s
        scheduler.isolate("b")
        assert [may_run(), may_run()] == ["b", "ac"]
        assert may_run(may_isolate=False) == "ac"
        now_s += 5.0
        assert may_run(may_isolate=False) == "b"


class TestRequestsThatWaitWithKv:
    def test_it_can_begin_when_its_blocks_are_here(self, scheduler: PooledScheduler) -> None:
        kv: Any = scheduler.kv
        waiting: Any = scheduler
        waiting.kv_holding_waiting.append(request())
        kv.away = {5}
        assert not scheduler.can_schedule()
        assert not scheduler._handle_blocked_waiting_request(request())
        kv.away = {9}
        assert scheduler.can_schedule()
        assert scheduler._handle_blocked_waiting_request(request())

    def test_its_blocks_are_needed_after_those_of_running_requests(
        self, scheduler: PooledScheduler
    ) -> None:
        waiting: Any = scheduler
        waiting.kv_holding_waiting.append(request())
        assert list(scheduler.blocks_under_way()) == [3, 5, 8]
        scheduler.running = [request(), request("no blocks")]
        assert list(scheduler.blocks_under_way()) == [3, 5, 8, 3, 5, 8]
