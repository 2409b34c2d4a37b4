"""The order in which a new worker loads the registered models."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpupool_state import History, ModelRow, Registry
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.lru import Candidate, start_order
from gpupoold.errors import GpupoolError

_logger = logging.getLogger(__name__)


async def rows_in_start_order(
    registry: Registry,
    history: History,
    cache: SnapshotCache,
    num_snapshots: Callable[[ModelRow], int] = lambda _: 1,
) -> list[ModelRow]:
    """Return all models, ordered to fill the cache with pinned, then recently used snapshots.

    Also records pins and earlier uses in the cache. ``num_snapshots`` returns for how many degrees
    a model has snapshots.

    Raises:
        Failed: the registry cannot be read.
    """
    rows = {str(row.spec.name): row for row in await registry.list()}
    cache.pinned = {name for name, row in rows.items() if row.is_pinned}
    await _recall_use(rows, history, cache)
    candidates = [
        Candidate(
            name,
            num_snapshots(row) * row.weight_bytes,
            cache.last_used_at(name) or 0.0,
            row.is_pinned,
        )
        for name, row in rows.items()
    ]
    return [rows[name] for name in start_order(candidates, cache.budget_bytes)]


async def _recall_use(rows: dict[str, ModelRow], history: History, cache: SnapshotCache) -> None:
    """Set the last use of each model from the history, or else from the registration."""
    unknown = [name for name in rows if cache.last_used_at(name) is None]
    if not unknown:
        return
    try:
        last_requests = await history.last_requests()
    except GpupoolError as error:
        _logger.warning("the last use of each model is unknown: %s", error)
        last_requests = {}
    for name in unknown:
        cache.touch(name, last_requests.get(name, rows[name].created_at))
