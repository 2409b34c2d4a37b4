"""Persistent state of the daemon: registry, API keys and history, in SQLite.

Imports only the standard library, aiosqlite and the domain, errors and file helpers of
``gpupoold``.

    with StateLock.acquire(folder):
        async with await Database.open(folder / DATABASE_NAME) as db:
            registry, history = Registry(db), History(db)
            await history.start()
            ...
            await history.stop()
"""

from gpupool_state.api_keys import ApiKeys, KeyRow, KeyUse
from gpupool_state.batches import BatchRow, BatchStatus, BatchStore, FileRow, ResultRow
from gpupool_state.db import Database
from gpupool_state.history import (
    DeviceMinuteRow,
    History,
    HistoryLimits,
    MinuteRow,
    RequestRow,
    UsageRow,
)
from gpupool_state.lock import StateLock
from gpupool_state.registry import (
    KnownDivisions,
    ModelRow,
    ProfilePhase,
    ProfileRow,
    Registry,
    check_names,
)

DATABASE_NAME = "gpupool.db"

__all__ = [
    "DATABASE_NAME",
    "ApiKeys",
    "BatchRow",
    "BatchStatus",
    "BatchStore",
    "Database",
    "DeviceMinuteRow",
    "FileRow",
    "History",
    "HistoryLimits",
    "KeyRow",
    "KeyUse",
    "KnownDivisions",
    "MinuteRow",
    "ModelRow",
    "ProfilePhase",
    "ProfileRow",
    "Registry",
    "RequestRow",
    "ResultRow",
    "StateLock",
    "UsageRow",
    "check_names",
]
