"""Operations that a module of developers adds to a worker's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.in_worker import OPERATIONS
from gpupoold.wire.messages import Call, CallResult
from gpupoold.worker.calls import answer
from gpupoold.worker.turns.loop import TurnLoop


def answered(method: str, **arguments: Any) -> CallResult:
    result = answer(cast(TurnLoop, None), Call(7, method, arguments))
    assert result is not None
    return result


def test_benchmarks_are_no_operations_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUPOOL_OPERATIONS", raising=False)
    result = answered("leftovers")
    assert result.error_code == "usage"
    assert "no operation 'leftovers'" in result.error_message


def test_a_named_module_adds_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPOOL_OPERATIONS", "benchmarks.in_worker")
    monkeypatch.setitem(OPERATIONS, "twice", lambda loop, number: {"twice": 2 * number})
    assert answered("twice", number=4).result == {"twice": 8}


@pytest.mark.parametrize("module", ["benchmarks.not_here", "gpupoold.units"])
def test_a_module_without_operations_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setenv("GPUPOOL_OPERATIONS", module)
    result = answered("leftovers")
    assert result.error_code == "usage"
    assert f"GPUPOOL_OPERATIONS={module}" in result.error_message


def test_every_error_of_such_an_operation_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUPOOL_OPERATIONS", "benchmarks.in_worker")
    monkeypatch.setitem(OPERATIONS, "halve", lambda loop, number: {"half": 1 // number})
    assert answered("halve", number=0).error_code == "failed"
    assert answered("halve", digits=3).error_code == "failed"
    result = answered("bench_switch", models=["a"])
    assert result.error_code in ("failed", "usage")
