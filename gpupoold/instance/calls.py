"""Named operations on a running instance: benchmarks and checks, asked for by the daemon."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpupoold.errors import GpupoolError, NoSuchModel, Refused, UsageError
from gpupoold.instance import tensors
from gpupoold.memory.kv import Place
from gpupoold.wire.messages import Call, CallResult

if TYPE_CHECKING:
    from gpupoold.instance.engine import ModelEngine
    from gpupoold.instance.turn_loop import TurnLoop


def answer(loop: TurnLoop, call: Call) -> CallResult:
    """Run ``call`` between two steps; errors become part of the answer."""
    try:
        operation = _OPERATIONS.get(call.method)
        if operation is None:
            raise UsageError(f"instances have no operation {call.method!r}")
        return CallResult(call.call_id, operation(loop, **call.args))
    except GpupoolError as error:
        return CallResult(call.call_id, None, error.code, error.message, error.hint)
    except (TypeError, AssertionError) as error:
        return CallResult(call.call_id, None, "failed", f"{call.method}: {error!r}")


def _check_integrity(loop: TurnLoop) -> dict[str, Any]:
    """Counters, page tables and host slots agree, or an AssertionError says what does not."""
    loop.residency.check_integrity()
    pool = loop.residency.pool
    return {"free_pages": pool.num_free, "pages": pool.num_pages}


def _checksum(loop: TurnLoop, model: str) -> dict[str, Any]:
    """SHA-256 of a model's weights and live KV blocks; makes it resident first."""
    engine = _engine(loop, model)
    loop.interrupt_turn()
    loop.switch_to(model)
    weights = tensors.over(loop.device, engine.weights.address, engine.info.weight_bytes)
    kv = hashlib.sha256()
    blocks = [b for c in engine.kv.chunks(Place.DEVICE) for b in engine.kv.live_blocks(c)]
    buffer = tensors.over(loop.device, engine.kv.address, engine.kv.geometry.total_bytes)
    for offset, num_bytes in engine.kv.geometry.extents(blocks):
        kv.update(buffer[offset : offset + num_bytes].cpu().numpy().tobytes())
    weights_sha = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
    return {"weights": weights_sha, "kv": kv.hexdigest(), "num_live_blocks": len(blocks)}


def _page_out(loop: TurnLoop, model: str) -> dict[str, Any]:
    """Take everything of a model off the device, as a switch under pressure would."""
    engine = _engine(loop, model)
    loop.interrupt_turn()
    moved = _leave(engine)
    engine.weights.evict()
    return {"kv_out_bytes": moved}


def _bench_switch(loop: TurnLoop, models: list[str], rounds: int) -> dict[str, Any]:
    """Alternate between two models, one resident at a time, and copy the same bytes plainly."""
    engines = [_engine(loop, name) for name in models]
    if not loop.ledger.is_idle():
        raise Refused("the device is serving requests", "run the benchmark on an idle daemon")
    for engine in engines:
        _leave(engine)
        engine.weights.evict()
    switches: list[dict[str, float]] = []
    memcpys_s: list[float] = []
    for index in range(2 * rounds + 2):
        engine, other = engines[index % 2], engines[(index + 1) % 2]
        started_s = time.perf_counter()
        _leave(other)
        other.weights.evict()
        evicted_s = time.perf_counter() - started_s
        stages = loop.residency.switch_in(engine.name)
        total_s = time.perf_counter() - started_s
        assert stages is not None
        memcpy_s = _plain_copy_s(loop, engine)
        if index < 2:
            continue  # first touches of pages and caches
        memcpys_s.append(memcpy_s)
        switches.append(
            {
                "total_s": total_s,
                "evict_s": evicted_s + stages.evict_s,
                "map_s": stages.map_s,
                "weights_s": stages.weights_s,
                "kv_s": stages.kv_s,
            }
        )
    return _summary(switches, memcpys_s, [engine.weights.num_bytes for engine in engines])


def _summary(
    switches: list[dict[str, float]], memcpys_s: list[float], num_bytes: list[int]
) -> dict[str, Any]:
    totals = sorted(switch["total_s"] for switch in switches)
    p50, memcpy_p50 = statistics.median(totals), statistics.median(memcpys_s)
    stages = ("evict_s", "map_s", "weights_s", "kv_s")
    return {
        "switches": len(totals),
        "bytes": max(num_bytes),
        "switch_p50_s": p50,
        "switch_p99_s": totals[min(len(totals) - 1, int(0.99 * len(totals)))],
        "memcpy_p50_s": memcpy_p50,
        "ratio": p50 / memcpy_p50,
        "limit_s": 1.3 * memcpy_p50 + 0.005,
        "stages_p50_s": {
            stage: statistics.median(switch[stage] for switch in switches) for stage in stages
        },
    }


def _plain_copy_s(loop: TurnLoop, engine: ModelEngine) -> float:
    """Seconds of one plain copy of the image's bytes into the mapped region."""
    started_s = time.perf_counter()
    loop.device.copy_in(
        engine.weights.address, engine.weights.image.address, engine.weights.num_bytes
    )
    loop.device.synchronize()
    return time.perf_counter() - started_s


def _leave(engine: ModelEngine) -> int:
    engine.kv.unback(engine.kv.free_chunks())
    return sum(engine.kv.page_out(chunk) for chunk in engine.kv.chunks(Place.DEVICE))


def _engine(loop: TurnLoop, model: str) -> ModelEngine:
    if model not in loop.engines:
        raise NoSuchModel(f"{model} is not loaded on instance {loop.instance}")
    return loop.engines[model]


_OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "check_integrity": _check_integrity,
    "checksum": _checksum,
    "page_out": _page_out,
    "bench_switch": _bench_switch,
}
