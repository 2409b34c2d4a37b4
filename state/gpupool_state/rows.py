"""The rows of the history and their tables."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from gpupoold.domain import (
    COUNT_NAMES,
    DeviceId,
    DeviceUse,
    Event,
    Lateness,
    RequestRecord,
    RequestStages,
    Switch,
    TimedCounts,
    UseCounts,
)

Value = str | int | float | None


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
    """Counts of a model's requests in the minute that began at ``minute_at``.

    The time is in wall-clock seconds. ``ttft`` and ``tbt`` are histograms in the table's form. A
    minute with a restart of the daemon has several rows.
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


@dataclass(frozen=True, slots=True)
class HistoryTable:
    """A history table; ``columns`` are all columns except ``id``.

    With ``is_rewritten`` a row may be written again with other values.
    """

    name: str
    columns: tuple[str, ...]
    is_rewritten: bool = False

    @property
    def insert(self) -> str:
        """Statement that adds a row, or rewrites the row: writing a batch twice is harmless."""
        marks = ", ".join("?" for _ in range(len(self.columns) + 1))
        values = ", ".join(f"{column} = excluded.{column}" for column in self.columns)
        again = f"UPDATE SET {values}" if self.is_rewritten else "NOTHING"
        return (
            f"INSERT INTO {self.name} (id, {', '.join(self.columns)}) VALUES ({marks}) "
            f"ON CONFLICT (id) DO {again}"
        )

    @property
    def delete_oldest(self) -> str:
        """Statement that deletes the given number of rows, oldest first."""
        return (
            f"DELETE FROM {self.name} WHERE id IN (SELECT id FROM {self.name} ORDER BY id LIMIT ?)"
        )


def _columns(row_type: type[Row]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(row_type) if field.name != "id")


REQUESTS = HistoryTable("requests", _columns(RequestRow))
SWITCHES = HistoryTable("switches", _columns(Switch))
EVENTS = HistoryTable("events", _columns(Event))
# The columns of a minute's nested fields: prefix of the columns, field, type of the field.
_NESTED = (
    ("late_by", "lateness", Lateness),
    ("first_token", "first_token", RequestStages),
    ("between_tokens", "between_tokens", RequestStages),
)
_NESTED_PATHS = {
    f"{prefix}_{one.name}": f"{name}.{one.name}"
    for prefix, name, durations in _NESTED
    for one in fields(durations)
}
_FLAT_COLUMNS = ("minute_at", "model", *COUNT_NAMES, "ttft", "tbt")
MINUTES = HistoryTable("slo_minutes", (*_FLAT_COLUMNS, *_NESTED_PATHS))
USAGE = HistoryTable("usage_hours", _columns(UsageRow), is_rewritten=True)
DEVICE_MINUTES = HistoryTable("device_minutes", _columns(DeviceMinuteRow))
TABLES = (REQUESTS, SWITCHES, EVENTS, MINUTES, USAGE, DEVICE_MINUTES)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row to write to a table; ``values`` begin with the id."""

    table: HistoryTable
    values: tuple[Value, ...]


def entry(table: HistoryTable, row_id: int, row: Row) -> Entry:
    """Return ``row`` in the form for writing, with the id ``row_id``."""
    names = (_NESTED_PATHS.get(column, column) for column in table.columns)
    return Entry(table, (row_id, *attrgetter(*names)(row)))


def request_row(row: sqlite3.Row) -> RequestRow:
    """Return a row of ``requests`` as recorded."""
    return RequestRow(**{column: row[column] for column in REQUESTS.columns})


def switch_row(row: sqlite3.Row) -> Switch:
    """Return a row of ``switches`` as recorded."""
    return Switch(**{column: row[column] for column in SWITCHES.columns})


def minute_row(row: sqlite3.Row) -> MinuteRow:
    """Return a row of ``slo_minutes`` as recorded."""
    nested: dict[str, Any] = {
        name: durations(*(row[f"{prefix}_{one.name}"] for one in fields(durations)))
        for prefix, name, durations in _NESTED
    }
    return MinuteRow(**nested, **{column: row[column] for column in _FLAT_COLUMNS})


def usage_row(row: sqlite3.Row) -> UsageRow:
    """Return a row of ``usage_hours``, or sums of rows."""
    return UsageRow(**{column: row[column] for column in USAGE.columns})


def device_minute_row(row: sqlite3.Row) -> DeviceMinuteRow:
    """Return a row of ``device_minutes``, or sums of rows."""
    return DeviceMinuteRow(**{column: row[column] for column in DEVICE_MINUTES.columns})


def event_row(row: sqlite3.Row) -> Event:
    """Return a row of ``events`` as recorded."""
    return Event(id=row["id"], **{column: row[column] for column in EVENTS.columns})
