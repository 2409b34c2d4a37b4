"""The history: requests, switches and events, bounded, written in the background."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from gpupool_state.db import Database, Value
from gpupoold.domain import DeviceId, DeviceUse, Event, EventLevel, RequestRecord, Switch, UseCounts
from gpupoold.durations import Lateness, RequestStages, TimedCounts
from gpupoold.errors import Failed
from gpupoold.event_kinds import EventKind

_log = logging.getLogger(__name__)
_event_log = logging.getLogger("gpupoold.events")

NUM_BUFFERED_ROWS = 10_000
NUM_EVENTS_IN_MEMORY = 1_000
_MAX_PRUNED_ROWS = 1000  # per transaction, because writes of the registry wait meanwhile
_MAX_RETRY_S = 30.0
_LOG_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_SWITCH_ORDERS = {"latest": "id DESC", "slowest": "total_s DESC, id DESC"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(RequestRecord):
    """A finished request with its last device, None if the request never ran.

    ``tbt_*_s`` are figures of the times between tokens.
    """

    device: DeviceId | None
    tbt_p50_s: float | None
    tbt_max_s: float | None


@dataclass(slots=True, kw_only=True)
class MinuteRow(TimedCounts):
    """Counts of a model's requests in the minute that began at ``minute_at``, wall-clock seconds.

    ``ttft`` and ``tbt`` are histograms in the table's form. A minute with a restart of the daemon
    has several rows.
    """

    minute_at: int
    model: str
    ttft: str = "[0.0]"
    tbt: str = "[0.0]"


@dataclass(kw_only=True)
class UsageRow(UseCounts):
    """Use of a model with an API key in the hour that began at ``hour_at``, in wall-clock seconds.

    ``api_key`` is the public id of a key, empty without one.
    """

    hour_at: int
    model: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMinuteRow(DeviceUse):
    """Work of a device from ``minute_at`` on, in wall-clock seconds."""

    minute_at: int


Row = RequestRow | Switch | Event | MinuteRow | UsageRow | DeviceMinuteRow
RowT = TypeVar("RowT", bound=Row)

# Fields with a column for each of their own fields: the field, the columns' prefix, the type.
_NESTED: dict[str, tuple[str, type[Lateness | RequestStages]]] = {
    "lateness": ("late_by", Lateness),
    "first_token": ("first_token", RequestStages),
    "between_tokens": ("between_tokens", RequestStages),
}


class HistoryTable(Generic[RowT]):
    """A history table; ``columns`` are all columns except ``id``, with the places in a row.

    With ``is_rewritten`` a row may be written again with other values.
    """

    def __init__(self, name: str, row_type: type[RowT], *, is_rewritten: bool = False) -> None:
        self.name = name
        self.is_rewritten = is_rewritten
        self._row_type = row_type
        self.columns: dict[str, str] = {}
        for field in fields(row_type):
            if nested := _NESTED.get(field.name):
                prefix, durations = nested
                for part in fields(durations):
                    self.columns[f"{prefix}_{part.name}"] = f"{field.name}.{part.name}"
            elif field.name != "id":
                self.columns[field.name] = field.name
        marks = ", ".join("?" for _ in range(len(self.columns) + 1))
        values = ", ".join(f"{column} = excluded.{column}" for column in self.columns)
        again = f"UPDATE SET {values}" if is_rewritten else "NOTHING"
        # Adds a row, or rewrites the row: writing a batch twice is harmless.
        self.insert = (
            f"INSERT INTO {name} (id, {', '.join(self.columns)}) VALUES ({marks}) "
            f"ON CONFLICT (id) DO {again}"
        )

    def read(self, row: sqlite3.Row) -> RowT:
        """Return a row as recorded, or sums of rows."""
        values: dict[str, Any] = {}
        for field in fields(self._row_type):
            if nested := _NESTED.get(field.name):
                prefix, durations = nested
                values[field.name] = durations(
                    *(row[f"{prefix}_{part.name}"] for part in fields(durations))
                )
            else:
                values[field.name] = row[field.name]
        return self._row_type(**values)


REQUESTS = HistoryTable("requests", RequestRow)
SWITCHES = HistoryTable("switches", Switch)
EVENTS = HistoryTable("events", Event)
MINUTES = HistoryTable("slo_minutes", MinuteRow)
USAGE = HistoryTable("usage_hours", UsageRow, is_rewritten=True)
DEVICE_MINUTES = HistoryTable("device_minutes", DeviceMinuteRow)


class Entry(NamedTuple):
    """A row to write to a table; ``values`` begin with the id."""

    table: HistoryTable[Any]
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """Bounds of the rows per table on disk, named as the settings ``[history]``."""

    max_requests: int = 100_000
    max_switches: int = 20_000
    max_events: int = 20_000
    max_minutes: int = 200_000
    max_usage_hours: int = 200_000
    max_device_minutes: int = 400_000

    def by_table(self) -> dict[HistoryTable[Any], int]:
        """Return the limits by table, of all tables."""
        return {
            REQUESTS: self.max_requests,
            SWITCHES: self.max_switches,
            EVENTS: self.max_events,
            MINUTES: self.max_minutes,
            USAGE: self.max_usage_hours,
            DEVICE_MINUTES: self.max_device_minutes,
        }


class History:
    """Stores the history without delaying the caller or raising errors of the disk.

    ``record_*`` put a row in memory and return; a task writes the rows every ``flush_interval_s``.
    Rows that cannot be written stay in a bounded buffer and are retried at growing intervals; rows
    beyond the buffer are dropped, oldest first, and counted in ``dropped_rows``. Queries of
    requests, switches and minutes return written rows, queries of events all rows; a query raises
    Failed if the database cannot be read. ``since`` is in wall-clock seconds. A condition of None
    matches all rows.

    Not thread-safe: to be used in the event loop's thread.
    """

    def __init__(
        self,
        db: Database,
        limits: HistoryLimits | None = None,
        flush_interval_s: float = 0.5,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._limits = limits or HistoryLimits()
        self._flush_interval_s = flush_interval_s
        self._now = now
        self._waiting: deque[Entry] = deque()
        self.dropped_rows = 0  # since the start
        self._feed: EventFeed | None = None
        self._last_ids: dict[HistoryTable[Any], int] = {}
        self._num_rows: dict[HistoryTable[Any], int] = {}
        self._task: asyncio.Task[None] | None = None
        self._filled = asyncio.Event()
        self._stopping = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._failing = False

    @property
    def last_event_id(self) -> int:
        """The id of the newest event, 0 without events."""
        return self._events.last_id

    async def start(self) -> None:
        """Read the last ids of the tables and start the writing task; required before recording."""
        if self._feed is not None:
            raise RuntimeError("the history was started before")
        for table in self._limits.by_table():
            (row,) = await self._db.fetch_all(
                f"SELECT coalesce(max(id), 0) AS last_id FROM {table.name}"
            )
            self._last_ids[table] = row["last_id"]
        self._feed = EventFeed(self._last_ids[EVENTS], NUM_EVENTS_IN_MEMORY)
        self._task = asyncio.create_task(self._write_until_stopped(), name="history-writer")

    async def stop(self) -> None:
        """Write the buffer, if possible, and stop the writing task; never raises for the disk."""
        if self._task is None:
            return
        self._stopping.set()
        self._filled.set()
        self._events.close()
        await asyncio.wait([self._task])
        if await self._flush_safely():
            await self._flush_safely()  # the first flush may have recorded an event (disk works)
        self._task = None
        self.dropped_rows += len(self._waiting)
        self._waiting.clear()

    def keep(self, limits: HistoryLimits) -> None:
        """Set the rows per table on disk, from the next write on; the buffers stay."""
        self._limits = limits

    def record_request(self, row: RequestRow) -> None:
        """Store a finished request; never blocks."""
        self._record(REQUESTS, self._next_id(REQUESTS), row)

    def record_switch(self, row: Switch) -> None:
        """Store a switch; never blocks."""
        self._record(SWITCHES, self._next_id(SWITCHES), row)

    def record_minute(self, row: MinuteRow) -> None:
        """Store a model's finished minute; never blocks."""
        self._record(MINUTES, self._next_id(MINUTES), row)

    def record_usage(self, row: UsageRow, row_id: int | None = None) -> int:
        """Store the use of an hour, or rewrite the row ``row_id``; never blocks.

        Returns the row's id.
        """
        row_id = self._next_id(USAGE) if row_id is None else row_id
        self._record(USAGE, row_id, row)
        return row_id

    def record_device_minute(self, row: DeviceMinuteRow) -> None:
        """Store the work of a device; never blocks."""
        self._record(DEVICE_MINUTES, self._next_id(DEVICE_MINUTES), row)

    def record_event(self, level: EventLevel, kind: EventKind, subject: str, message: str) -> Event:
        """Store an event, write a log record and wake followers; never blocks."""
        event = self._events.publish(self._now(), level, kind, subject, message)
        extra = {"event_kind": kind, "event_subject": subject}
        text = "%s %s: %s"
        _event_log.log(_LOG_LEVELS[level], text, kind, subject, message, extra=extra, stacklevel=2)
        self._record(EVENTS, event.id, event)
        return event

    async def recent_requests(
        self,
        model: str | None = None,
        since: float | None = None,
        limit: int = 100,
        id_part: str | None = None,
    ) -> list[RequestRow]:
        """Return requests that arrived at ``since`` or later, latest arrival first.

        ``id_part`` is contained in the id of each.
        """
        wanted: dict[str, Value] = {
            "model = ?": model,
            "arrived_at >= ?": since,
            "instr(request_id, ?)": id_part,
        }
        return await self._select(REQUESTS, wanted, "arrived_at DESC, id DESC", limit)

    async def find_request(self, text: str) -> RequestRow | None:
        """Return the latest request whose id contains ``text``, or None."""
        rows = await self._select(REQUESTS, {"instr(request_id, ?)": text}, "id DESC", 1)
        return rows[0] if rows else None

    async def last_requests(self) -> dict[str, float]:
        """Return the arrival of each model's latest stored request in wall-clock seconds."""
        rows = await self._db.fetch_all(
            "SELECT model, max(arrived_at) AS last_at FROM requests GROUP BY model"
        )
        return {row["model"]: row["last_at"] for row in rows}

    async def recent_switches(
        self,
        limit: int = 100,
        *,
        model: str | None = None,
        device: int | None = None,
        since: float | None = None,
        order: Literal["latest", "slowest"] = "latest",
    ) -> list[Switch]:
        """Return switches to ``model`` on ``device``, latest or slowest first."""
        wanted: dict[str, Value] = {"model = ?": model, "device = ?": device, "at >= ?": since}
        return await self._select(SWITCHES, wanted, _SWITCH_ORDERS[order], limit)

    async def minutes(
        self, since: float, model: str | None = None, num_at_once: int = 1000
    ) -> AsyncIterator[list[MinuteRow]]:
        """Yield minutes that ended after ``since``, of one model or of all, oldest first.

        Each list has at most ``num_at_once`` rows, because there may be very many minutes.
        """
        after = since - 60, 2**63 - 1  # the largest id
        while True:
            rows = await self._db.fetch_all(
                "SELECT * FROM slo_minutes WHERE (minute_at, id) > (?1, ?2) "
                "AND (?3 IS NULL OR model = ?3) ORDER BY minute_at, id LIMIT ?4",
                (*after, model, num_at_once),
            )
            if not rows:
                return
            yield [MINUTES.read(row) for row in rows]
            after = rows[-1]["minute_at"], rows[-1]["id"]

    async def usage(self, since: float) -> list[UsageRow]:
        """Return sums by model and key over the hours that ended after ``since``.

        ``hour_at`` is the first of the hours.
        """
        rows = await self._db.fetch_all(
            "SELECT min(hour_at) AS hour_at, model, api_key, sum(num_requests) AS num_requests, "
            "sum(num_prompt_tokens) AS num_prompt_tokens, "
            "sum(num_output_tokens) AS num_output_tokens, "
            "sum(gpu_s) AS gpu_s, sum(energy_j) AS energy_j "
            "FROM usage_hours WHERE hour_at > ? GROUP BY model, api_key ORDER BY model, api_key",
            (since - 3600,),
        )
        return [USAGE.read(row) for row in rows]

    async def device_sums(self, since: float) -> list[DeviceMinuteRow]:
        """Return sums by device over the minutes that ended after ``since``.

        ``minute_at`` is the first of the minutes; bytes are means over the time.
        """
        mean = "CAST(sum({0} * seconds) / max(sum(seconds), 1e-9) AS INTEGER) AS {0}"
        rows = await self._db.fetch_all(
            "SELECT min(minute_at) AS minute_at, device, sum(seconds) AS seconds, "
            "sum(computing_s) AS computing_s, sum(switching_s) AS switching_s, "
            f"sum(energy_j) AS energy_j, {mean.format('kv_host_bytes')}, "
            f"{mean.format('kv_host_slab_bytes')} "
            "FROM device_minutes WHERE minute_at > ? GROUP BY device ORDER BY device",
            (since - 60,),
        )
        return [DEVICE_MINUTES.read(row) for row in rows]

    async def _select(
        self, table: HistoryTable[RowT], wanted: dict[str, Value], order: str, limit: int
    ) -> list[RowT]:
        given = {term: value for term, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        rows = await self._db.fetch_all(
            f"SELECT * FROM {table.name} {where} ORDER BY {order} LIMIT ?",
            (*given.values(), max(0, limit)),
        )
        return [table.read(row) for row in rows]

    async def events_after(self, after_id: int, limit: int = 100) -> list[Event]:
        """Return events with ids above ``after_id``, oldest first, also events not yet on disk.

        Raises Failed: some of the events are only on disk, and the database cannot be read.
        """
        limit = max(0, limit)
        floor_id = self._events.floor_id
        held = self._events.held_after(max(after_id, floor_id))
        if after_id >= floor_id:
            return held[:limit]
        rows = await self._db.fetch_all(
            "SELECT * FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?",
            (after_id, floor_id, limit),
        )
        return ([EVENTS.read(row) for row in rows] + held)[:limit]

    async def wait_event(self, after_id: int, timeout_s: float) -> bool:
        """Wait for an event with an id above ``after_id``; False after ``timeout_s`` or at stop."""
        return await self._events.wait(after_id, timeout_s)

    async def flush(self) -> bool:
        """Write everything recorded so far; return False after a failure of the disk."""
        async with self._flushing:
            batch = [*self._waiting]
            self._waiting.clear()
            try:
                await self._write_or_put_back(batch)
                await self._prune()
            except Failed as error:
                self._note_failure(error)
                return False
        self._note_success()
        return True

    @property
    def _events(self) -> EventFeed:
        if self._feed is None:
            raise RuntimeError("the history has not been started")
        return self._feed

    def _next_id(self, table: HistoryTable[Any]) -> int:
        if self._feed is None:
            raise RuntimeError("the history has not been started")
        self._last_ids[table] += 1
        return self._last_ids[table]

    def _record(self, table: HistoryTable[Any], row_id: int, row: Row) -> None:
        if self._task is None:
            self.dropped_rows += 1
            return
        self._waiting.append(Entry(table, (row_id, *attrgetter(*table.columns.values())(row))))
        self._trim()
        self._filled.set()

    def _put_back(self, batch: list[Entry]) -> None:
        self._waiting.extendleft(reversed(batch))
        self._trim()

    def _trim(self) -> None:
        while len(self._waiting) > NUM_BUFFERED_ROWS:
            self._waiting.popleft()
            self.dropped_rows += 1

    async def _write_until_stopped(self) -> None:
        pause_s = self._flush_interval_s
        while not self._stopping.is_set():
            await self._filled.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            self._filled.clear()
            if await self._flush_safely():
                pause_s = self._flush_interval_s
            else:
                self._filled.set()
                pause_s = min(2 * pause_s, max(_MAX_RETRY_S, self._flush_interval_s))

    async def _flush_safely(self) -> bool:
        try:
            return await self.flush()
        except Exception:
            # The writing task must not end: the next flush may succeed.
            _log.exception("writing the history failed unexpectedly")
            return False

    async def _write_or_put_back(self, batch: list[Entry]) -> None:
        try:
            await self._write(batch)
        except (Failed, asyncio.CancelledError):
            # The commit may have succeeded or not: count the rows again, and write the rows again,
            # which has no effect for rows already in the table.
            self._num_rows.clear()
            self._put_back(batch)
            raise
        except Exception:
            _log.exception("a history row cannot be written; trying the rows one by one")
            await self._write_singly(batch)

    async def _write(self, batch: Iterable[Entry]) -> None:
        by_table: dict[HistoryTable[Any], list[tuple[Value, ...]]] = {}
        for item in batch:
            by_table.setdefault(item.table, []).append(item.values)
        if not by_table:
            return
        added: dict[HistoryTable[Any], int] = {}
        async with self._db.write(durable=False) as tx:
            for table, rows in by_table.items():
                added[table] = await tx.execute_many(table.insert, rows)
        for table, num_added in added.items():
            if table.is_rewritten:
                self._num_rows.pop(table, None)  # SQLite counts rewritten rows too
            elif table in self._num_rows:
                self._num_rows[table] += num_added

    async def _write_singly(self, batch: list[Entry]) -> None:
        # A row that SQLite refuses is dropped; the rest of the batch is written.
        for index, item in enumerate(batch):
            try:
                await self._write([item])
            except (Failed, asyncio.CancelledError):
                self._num_rows.clear()
                self._put_back(batch[index:])
                raise
            except Exception as error:
                _log.warning("dropped a row of %s: %s", item.table.name, error)
                self.dropped_rows += 1

    async def _prune(self) -> None:
        for table, limit in self._limits.by_table().items():
            # A tenth of the table at once, so that a full table is not pruned at every flush.
            batch = max(1, min(_MAX_PRUNED_ROWS, limit // 10))
            num_rows = await self._count(table)
            while num_rows > limit:
                async with self._db.write(durable=False) as tx:
                    num_rows -= await tx.execute(
                        f"DELETE FROM {table.name} WHERE id IN "
                        f"(SELECT id FROM {table.name} ORDER BY id LIMIT ?)",
                        (batch,),
                    )
                self._num_rows[table] = num_rows

    async def _count(self, table: HistoryTable[Any]) -> int:
        if table not in self._num_rows:
            (row,) = await self._db.fetch_all(f"SELECT count(*) AS num FROM {table.name}")
            self._num_rows[table] = row["num"]
        return self._num_rows[table]

    def _note_failure(self, error: Failed) -> None:
        if self._failing:
            return
        self._failing = True
        text = f"the history cannot be written, serving continues: {error}"
        self.record_event("error", "history", "state", text)

    def _note_success(self) -> None:
        if not self._failing:
            return
        self._failing = False
        text = f"the history is written again; {self.dropped_rows} rows were lost since the start"
        self.record_event("info", "history", "state", text)


class EventFeed:
    """Numbers events and keeps the latest ``num_held`` in memory, also when the disk fails.

    Not thread-safe: to be used in the event loop's thread.
    """

    def __init__(self, last_id: int, num_held: int) -> None:
        self.last_id = last_id
        self.floor_id = last_id  # events up to this id are not in memory
        self._held: deque[Event] = deque()
        self._num_held = num_held
        self._news = asyncio.Event()
        self._closed = False

    def publish(self, at: float, level: EventLevel, kind: str, subject: str, message: str) -> Event:
        """Add an event with the next id and wake all waiters."""
        self.last_id += 1
        event = Event(self.last_id, at, level, kind, subject, message)
        self._held.append(event)
        if len(self._held) > self._num_held:
            self.floor_id = self._held.popleft().id
        self._wake()
        return event

    def held_after(self, after_id: int) -> list[Event]:
        """Return the events in memory with larger ids, oldest first.

        No event is missing if ``after_id >= floor_id``.
        """
        return [event for event in self._held if event.id > after_id]

    async def wait(self, after_id: int, timeout_s: float) -> bool:
        """Wait for an event with a larger id; False after ``timeout_s`` or when closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.last_id <= after_id and not self._closed:
                    await self._news.wait()
        return self.last_id > after_id

    def close(self) -> None:
        """Wake all waiters; later calls of ``wait`` return at once."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # Each wake-up uses a new Event, so that every waiter on the old Event returns, and none is
        # left that a ``clear`` could miss.
        self._news.set()
        self._news = asyncio.Event()
