"""Measured latency profiles of models, by kind of device."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from gpupool_state.writer import Source, Transaction
from gpupoold.domain import FittedLaw


class ProfilePhase(StrEnum):
    """The phase described by a profile."""

    PREFILL = "prefill"
    DECODE = "decode"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow(FittedLaw):
    """The measured latency of a model in one phase on one kind of device.

    ``device`` is the name of the kind of device, ``dtype`` the type of the weights. The constant of
    a switch is in bytes per second, without a fit. ``measured_at`` is in wall-clock seconds.
    """

    device: str
    phase: ProfilePhase
    engine_version: str
    revision: str | None
    dtype: str
    measured_at: float


_COLUMNS = ("model", *(field.name for field in fields(ProfileRow)))
_NAMES = ", ".join(_COLUMNS)
_INSERT = f"INSERT INTO profiles ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_SELECT = f"SELECT {_NAMES} FROM profiles"
_ORDER = "ORDER BY model, measured_at, device, phase"


async def replace_profiles(tx: Transaction, model: str, rows: Sequence[ProfileRow]) -> None:
    """Replace a model's profiles on the devices named in ``rows``."""
    for device in sorted({row.device for row in rows}):
        await tx.execute("DELETE FROM profiles WHERE model = ? AND device = ?", (model, device))
    await tx.execute_many(_INSERT, [_values(model, row) for row in rows])


async def profiles_of(source: Source, model: str) -> tuple[ProfileRow, ...]:
    """Return all profiles of a model, the latest last."""
    rows = await source.fetch_all(f"{_SELECT} WHERE model = ? {_ORDER}", (model,))
    return tuple(map(_profile_row, rows))


async def all_profiles(source: Source) -> dict[str, tuple[ProfileRow, ...]]:
    """Return the profiles by name of the model; models without profiles are left out."""
    found: dict[str, list[ProfileRow]] = {}
    for row in await source.fetch_all(f"{_SELECT} {_ORDER}"):
        found.setdefault(row["model"], []).append(_profile_row(row))
    return {model: tuple(rows) for model, rows in found.items()}


def _values(model: str, row: ProfileRow) -> tuple[str | int | float | None, ...]:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    # json.dumps writes enough digits of a float to read back the same value.
    changed = {"phase": row.phase.value, "constants": json.dumps(row.constants)}
    return (model, *(values | changed).values())


def _profile_row(row: sqlite3.Row) -> ProfileRow:
    values = {field.name: row[field.name] for field in fields(ProfileRow)}
    values["phase"] = ProfilePhase(row["phase"])
    values["constants"] = tuple(json.loads(row["constants"]))
    return ProfileRow(**values)
