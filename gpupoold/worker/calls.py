"""Named operations on a running worker, requested by the daemon; developers may add more."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any

from gpupoold.errors import GpupoolError, NoSuchModel, UsageError
from gpupoold.memory.pages import OutOfPages
from gpupoold.system.activity import ThreadPhase
from gpupoold.wire.messages import Call, CallResult
from gpupoold.worker.turns.loop import TurnLoop
from gpupoold.worker.turns.self_check import verify


def answer(loop: TurnLoop, call: Call) -> CallResult | None:
    """Run ``call`` between two steps; errors become part of the answer.

    Returns None if the loop sends the answer later, because the call reads files.
    """
    if call.method in _BESIDE:
        loop.run_beside(lambda: _answer_of(loop, call, _BESIDE.get(call.method)))
        return None
    return _answer_of(loop, call, _OPERATIONS.get(call.method))


def _answer_of(loop: TurnLoop, call: Call, operation: _Operation | None) -> CallResult:
    is_own = operation is not None
    try:
        operation = operation or _more_operations().get(call.method)
        if operation is None:
            raise UsageError(f"workers have no operation {call.method!r}")
        return CallResult(call.call_id, operation(loop, **call.args))
    except GpupoolError as error:
        return CallResult(call.call_id, None, error.code, error.message, error.hint)
    except Exception as error:  # every error of an operation for developers is an answer
        if is_own and not isinstance(error, TypeError | AssertionError | OutOfPages):
            raise
        return CallResult(call.call_id, None, "failed", f"{call.method}: {error!r}")


def _more_operations() -> Mapping[str, _Operation]:
    """Return ``OPERATIONS`` of the module that ``GPUPOOL_OPERATIONS`` names; none without."""
    name = os.environ.get("GPUPOOL_OPERATIONS")
    if not name:
        return {}
    try:
        operations: Mapping[str, _Operation] = importlib.import_module(name).OPERATIONS
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"GPUPOOL_OPERATIONS={name}: {error}", "name an importable module with OPERATIONS"
        ) from error
    return operations


def _check_integrity(loop: TurnLoop) -> dict[str, Any]:
    """Check counters, page tables, host slots and the driver; raise AssertionError on a
    mismatch.
    """
    num_owned = loop.residency.check_integrity(
        loop.migrations.sent_bytes, is_loading=loop.loads.is_busy
    )
    for engine in loop.engines.values():
        engine.check_encoder_outputs()
    pool = loop.residency.pool
    driver = loop.driver_memory.check()
    pages = {"free_pages": pool.num_free, "owned_pages": num_owned, "pages": pool.num_pages}
    return {**pages, **driver}


def _page_out(loop: TurnLoop, model: str) -> dict[str, Any]:
    """Evict all of a model from the device, as a switch under memory pressure does."""
    if loop.residency.forget_unbound(model) and model not in loop.engines:
        return {"kv_out_bytes": 0}
    engine = loop.engine(model)
    loop.interrupt_turn()
    return {"kv_out_bytes": loop.residency.page_out(engine.name)}


def _verify(loop: TurnLoop, model: str) -> dict[str, Any]:
    """Compare answers amid switches and migrations with undisturbed ones; runs between steps.

    Returns the first difference as ``problem``, which is empty for equal answers.
    """
    engine = loop.turns.call(loop.engine, model)

    def checked() -> Generator[None, None, str]:
        slices = verify(engine, loop.residency)
        while loop.engine(model) is engine:
            try:
                next(slices)
            except StopIteration as end:
                return str(end.value)
            yield
        raise NoSuchModel(f"{model} has another engine now")

    return {"problem": loop.turns.run_slices(checked(), ThreadPhase.SELF_CHECK, model)}


def _load_adapter(loop: TurnLoop, model: str, number: int, name: str, path: str) -> dict[str, Any]:
    """Make an adapter of a loaded model known to its engine; runs beside steps."""
    adapters = loop.turns.call(loop.engine, model).adapters
    if (adapter := adapters.read(number, name, path)) is not None:
        loop.turns.call(adapters.add, adapter)
    return {}


def _unload_adapter(loop: TurnLoop, model: str, number: int) -> dict[str, Any]:
    loop.engine(model).adapters.remove(number)
    return {}


_Operation = Callable[..., dict[str, Any]]

_OPERATIONS: dict[str, _Operation] = {
    "check_integrity": _check_integrity,
    "page_out": _page_out,
    "unload_adapter": _unload_adapter,
}
_BESIDE: dict[str, _Operation] = {"load_adapter": _load_adapter, "verify": _verify}
