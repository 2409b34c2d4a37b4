"""In which order models are loaded, from what is recorded of them."""

from __future__ import annotations

from gpupool_state import Database, History, Registry, RequestRow
from gpupoold.control.models.snapshots import rows_in_start_order
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.domain import FinishReason, ModelName, ModelSpec

SIZE = 1 << 20


async def register(registry: Registry, name: str, *, is_pinned: bool = False) -> None:
    await registry.add(ModelSpec(ModelName(name), source=name, path=f"/models/{name}"))
    await registry.set_loaded(
        name, architecture="", weight_bytes=SIZE, kv_bytes_per_token=1, max_model_len=1
    )
    await registry.set_pinned(name, is_pinned)


async def request(history: History, model: str, arrived_at: float) -> None:
    row = RequestRow(
        request_id=f"{model} {arrived_at}",
        model=ModelName(model),
        device=None,
        arrived_at=arrived_at,
        ttft_s=None,
        tbt_p50_s=None,
        tbt_p99_s=None,
        tbt_max_s=None,
        num_prompt_tokens=1,
        num_output_tokens=1,
        num_tokens_in_time=1,
        finish_reason=FinishReason.STOP,
        total_s=0.1,
    )
    history.record_request(row)
    await history.flush()


async def order(registry: Registry, history: History, cache: SnapshotCache) -> list[str]:
    return [row.spec.name for row in await rows_in_start_order(registry, history, cache)]


async def test_pinned_ones_then_those_used_last(registry: Registry, history: History) -> None:
    for name in ("a", "b", "c"):
        await register(registry, name)
    await register(registry, "pinned", is_pinned=True)
    for at, name in enumerate(("c", "a", "b", "c")):
        await request(history, name, 1e6 + at)
    cache = SnapshotCache(10 * SIZE)
    assert await order(registry, history, cache) == ["pinned", "c", "b", "a"]
    assert cache.pinned == {"pinned"}
    assert cache.last_used_at("a") == 1e6 + 1


async def test_what_has_been_used_since_counts(registry: Registry, history: History) -> None:
    for name in ("a", "b"):
        await register(registry, name)
        await request(history, name, 1e6)
    cache = SnapshotCache(10 * SIZE)
    cache.touch("b")
    assert await order(registry, history, cache) == ["b", "a"]
    cache.touch("a")
    assert await order(registry, history, cache) == ["a", "b"]


async def test_one_that_was_never_used_counts_from_when_it_was_added(
    database: Database, history: History
) -> None:
    for name, created_at in (("old", 1e6), ("new", 3e6)):
        await register(Registry(database, now=lambda at=created_at: at), name)  # type: ignore[misc]
    await register(Registry(database), "used")
    await request(history, "used", 2e6)
    cache = SnapshotCache(10 * SIZE)
    assert await order(Registry(database), history, cache) == ["new", "used", "old"]


async def test_a_small_cache(registry: Registry, history: History) -> None:
    for at, name in enumerate(("a", "b", "c")):
        await register(registry, name)
        await request(history, name, 1e6 + at)
    assert await order(registry, history, SnapshotCache(2 * SIZE)) == ["c", "a", "b"]
