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
from gpupool_state.db import Database, StateLock
from gpupool_state.divisions import KnownDivisions
from gpupool_state.history import History, HistoryLimits
from gpupool_state.profiles import ProfilePhase, ProfileRow
from gpupool_state.registry import ModelRow, Registry, check_names
from gpupool_state.rows import DeviceMinuteRow, MinuteRow, RequestRow, UsageRow

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
