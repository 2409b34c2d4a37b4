"""A request that goes on in another engine is queued whole, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.v1.request import RequestStatus

from gpupoold.worker.engine import scheduler, vllm_process
from gpupoold.worker.engine.vllm_process import PooledMemory


class Engine:
    """An engine core's queue and its worker's records."""

    def __init__(
        self, *, is_full: bool = False, has_v2_runner: bool = False, uses_mrope: bool = False
    ) -> None:
        self.queue: list[str] = []
        self.recorded_when_queued: list[bool] = []
        self.records: dict[str, Any] = {}
        self._is_full = is_full
        groups = SimpleNamespace(kv_cache_groups=[None])
        runner = SimpleNamespace(
            requests=self.records,
            kv_cache_config=groups,
            uses_mrope=uses_mrope,
            _init_mrope_positions=self._place,
        )
        self._worker = PooledMemory()
        self._worker.model_runner = runner
        self.model_executor = SimpleNamespace(collective_rpc=self._call)
        self.scheduler = SimpleNamespace(
            finished_req_ids={"a", "b"},
            prev_step_scheduled_req_ids={"a", "c"},
            use_v2_model_runner=has_v2_runner,
        )

    def _call(self, method: str, args: tuple[Any, ...]) -> None:
        """Call the worker, as vLLM's executor does on each rank."""
        getattr(self._worker, method)(*args)

    def _place(self, record: Any) -> None:
        """Give positions as vLLM's runner does, from the images of the record."""
        record.mrope_position_delta = -len(record.mm_features)

    def add_request(self, request: Any, _wave: int) -> None:
        if self._is_full:
            raise ValueError("full")
        self.recorded_when_queued.append(request.request_id in self.records)
        self.queue.append(request.request_id)


def request() -> Any:
    return SimpleNamespace(
        request_id="a",
        prompt_token_ids=[1, 2],
        mm_features=["an image"],
        sampling_params=None,
        lora_request="adapter",
        status=RequestStatus.WAITING,
        append_output_token_ids=lambda _: None,
        take_prefill_stats=lambda: None,
    )


def test_the_record_is_there_when_it_is_queued() -> None:
    engine, asked = Engine(), request()
    scheduler.resume(engine, asked, 0, [7, 8])  # type: ignore[arg-type]
    assert (engine.queue, engine.recorded_when_queued) == (["a"], [True])
    assert engine.records["a"].output_token_ids == [7, 8]
    assert engine.records["a"].lora_request == "adapter"
    assert asked.status is RequestStatus.PREEMPTED


@pytest.mark.parametrize("uses_mrope", [False, True])
def test_the_record_has_the_images(uses_mrope: bool) -> None:
    engine = Engine(uses_mrope=uses_mrope)
    scheduler.resume(engine, request(), 0, [7, 8])  # type: ignore[arg-type]
    assert engine.records["a"].mm_features == ["an image"]
    assert engine.records["a"].mrope_position_delta == (-1 if uses_mrope else None)


def test_the_second_model_runner_wants_no_record() -> None:
    engine, asked = Engine(has_v2_runner=True), request()
    scheduler.resume(engine, asked, 0, [7, 8])  # type: ignore[arg-type]
    assert (engine.queue, engine.records) == (["a"], {})
    assert asked.status is RequestStatus.PREEMPTED
    assert engine.scheduler.finished_req_ids == {"a", "b"}  # told first, then that it is new


def test_its_end_a_moment_ago_is_not_told_to_the_worker() -> None:
    """Who leaves and comes back at once is the same request to the worker."""
    engine = Engine()
    scheduler.resume(engine, request(), 0, [7])  # type: ignore[arg-type]
    assert engine.scheduler.finished_req_ids == {"b"}
    assert engine.scheduler.prev_step_scheduled_req_ids == {"c"}


def test_a_record_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(vllm_process, "_generator", fail)
    engine = Engine()
    with pytest.raises(MemoryError):
        scheduler.resume(engine, request(), 0, [7])  # type: ignore[arg-type]
    assert (engine.queue, engine.records) == ([], {})


def test_a_request_that_the_engine_does_not_take() -> None:
    engine = Engine(is_full=True)
    with pytest.raises(ValueError, match="full"):
        scheduler.resume(engine, request(), 0, [7])  # type: ignore[arg-type]
    assert engine.records == {}
