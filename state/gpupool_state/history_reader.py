"""Queries of stored requests, switches and minutes by model, device and time."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from typing import Literal

from gpupool_state.db import Database
from gpupool_state.rows import (
    DeviceMinuteRow,
    MinuteRow,
    RequestRow,
    UsageRow,
    Value,
    device_minute_row,
    minute_row,
    request_row,
    switch_row,
    usage_row,
)
from gpupoold.domain import Switch

_LARGEST_ID = 2**63 - 1
_SWITCH_ORDERS = {"latest": "id DESC", "slowest": "total_s DESC, id DESC"}


class HistoryReader:
    """Queries of written rows; every method raises Failed if the database cannot be read.

    ``since`` is in wall-clock seconds. A condition of None matches all rows.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

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
        rows = await self._select("requests", wanted, "arrived_at DESC, id DESC", limit)
        return [request_row(row) for row in rows]

    async def find_request(self, text: str) -> RequestRow | None:
        """Return the latest request whose id contains ``text``, or None."""
        row = await self._db.fetch_one(
            "SELECT * FROM requests WHERE instr(request_id, ?) ORDER BY id DESC LIMIT 1", (text,)
        )
        return None if row is None else request_row(row)

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
        rows = await self._select("switches", wanted, _SWITCH_ORDERS[order], limit)
        return [switch_row(row) for row in rows]

    async def minutes(
        self, since: float, model: str | None = None, num_at_once: int = 1000
    ) -> AsyncIterator[list[MinuteRow]]:
        """Yield minutes that ended after ``since``, of one model or of all, oldest first.

        Each list has at most ``num_at_once`` rows, because there may be very many minutes.
        """
        after = since - 60, _LARGEST_ID
        while True:
            rows = await self._db.fetch_all(
                "SELECT * FROM slo_minutes WHERE (minute_at, id) > (?1, ?2) "
                "AND (?3 IS NULL OR model = ?3) ORDER BY minute_at, id LIMIT ?4",
                (*after, model, num_at_once),
            )
            if not rows:
                return
            yield [minute_row(row) for row in rows]
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
        return [usage_row(row) for row in rows]

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
        return [device_minute_row(row) for row in rows]

    async def _select(
        self, table: str, wanted: dict[str, Value], order: str, limit: int
    ) -> list[sqlite3.Row]:
        """Return the rows that match all conditions whose value is not None."""
        given = {term: value for term, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        return await self._db.fetch_all(
            f"SELECT * FROM {table} {where} ORDER BY {order} LIMIT ?",
            (*given.values(), max(0, limit)),
        )
