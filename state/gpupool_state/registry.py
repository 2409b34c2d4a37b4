"""The registered models and their aliases."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from gpupool_state.db import Database, Source, Transaction, Value, storable
from gpupoold.domain import Adapter, FittedLaw, ModelSpec, ModelState, Preset, Targets
from gpupoold.errors import NoSuchModel, Refused, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")

# A space cannot be part of an alias, so a space can separate aliases.
_SELECT = """
SELECT models.*, (
    SELECT group_concat(alias, ' ')
    FROM (SELECT alias FROM aliases WHERE model = models.name AND kind = 'alias' ORDER BY id)
) AS aliases, (
    SELECT json_group_array(json_array(kind, alias, details))
    FROM (SELECT * FROM aliases WHERE model = models.name AND kind != 'alias' ORDER BY id)
) AS further
FROM models
"""
# Columns of a model that are fields of its specification.
_PLAIN = ("name", "source", "path", "revision", "dtype", "max_model_len", "pace")
_FIND = f"{_SELECT} WHERE name = ?1 OR name = (SELECT model FROM aliases WHERE alias = ?1)"

_INSERT_DIVISION = """
INSERT INTO divisions (model, engine_version, degree, reason)
SELECT name, ?2, ?3, ?4 FROM models WHERE name = ?1
"""


class ProfilePhase(StrEnum):
    """The phase described by a profile."""

    PREFILL = "prefill"
    DECODE = "decode"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow(FittedLaw):
    """The measured latency of a model in one phase on one kind of device.

    ``device`` names the kind of device, ``dtype`` the type of the weights. The constant of a switch
    is in bytes per second, without a fit. ``measured_at`` is in wall-clock seconds.
    """

    device: str
    phase: ProfilePhase
    engine_version: str
    revision: str | None
    dtype: str
    measured_at: float


_PROFILE_COLUMNS = ("model", *(field.name for field in fields(ProfileRow)))
_PROFILE_NAMES = ", ".join(_PROFILE_COLUMNS)
_INSERT_PROFILE = (
    f"INSERT INTO profiles ({_PROFILE_NAMES}) VALUES ({', '.join('?' * len(_PROFILE_COLUMNS))})"
)
_SELECT_PROFILES = f"SELECT {_PROFILE_NAMES} FROM profiles"
_ORDER = "ORDER BY model, measured_at, device, phase"


async def replace_profiles(tx: Transaction, model: str, rows: Sequence[ProfileRow]) -> None:
    """Replace a model's profiles on the devices named in ``rows``."""
    for device in sorted({row.device for row in rows}):
        await tx.execute("DELETE FROM profiles WHERE model = ? AND device = ?", (model, device))
    await tx.execute_many(_INSERT_PROFILE, [_values(model, row) for row in rows])


async def profiles_of(source: Source, model: str) -> tuple[ProfileRow, ...]:
    """Return all profiles of a model, the latest last."""
    rows = await source.fetch_all(f"{_SELECT_PROFILES} WHERE model = ? {_ORDER}", (model,))
    return tuple(map(_profile_row, rows))


async def all_profiles(source: Source) -> dict[str, tuple[ProfileRow, ...]]:
    """Return the profiles by name of the model; models without profiles are left out."""
    found: dict[str, list[ProfileRow]] = {}
    for row in await source.fetch_all(f"{_SELECT_PROFILES} {_ORDER}"):
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


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A registered model and the facts known of the model.

    ``loaded_max_model_len`` is the engine's limit in tokens, ``spec.max_model_len`` the requested
    limit. Before the first load, ``architecture`` is empty, the byte counts are 0 and
    ``loaded_max_model_len`` is None. ``created_at`` is in wall-clock seconds. ``profiles`` are the
    latency profiles, the latest last. The weights snapshot of a pinned model stays in host memory.
    ``engine_bytes`` is the memory of an engine outside the pages, as measured by the latest load on
    each kind of device.
    """

    spec: ModelSpec
    state: ModelState
    error: str
    architecture: str
    weight_bytes: int
    kv_bytes_per_token: int
    loaded_max_model_len: int | None
    created_at: float
    profiles: tuple[ProfileRow, ...] = ()
    is_pinned: bool = False
    engine_bytes: Mapping[str, int] = field(default_factory=dict)


class Registry:
    """Models and aliases in the database; a change is durable when the call returns.

    Names and aliases share one name space. All methods raise ``Failed``, and change nothing, if the
    disk is full or the database is locked or damaged. Methods that change a model take the name,
    not an alias, and raise NoSuchModel if no model has it. All changes must go through this object,
    because the list of models is cached until the next change.
    """

    def __init__(self, db: Database, now: Callable[[], float] = time.time) -> None:
        self.divisions = KnownDivisions(db)
        self._db = db
        self._now = now
        self._listed: tuple[ModelRow, ...] | None = None
        self._num_changes = 0

    async def add(self, spec: ModelSpec) -> ModelRow:
        """Register a model with its aliases, in state ``registered``.

        Raises:
            UsageError: a name, alias or path is invalid.
            Refused: the name or an alias is taken; the message names the owner.
        """
        _check_spec(spec)
        async with self._changing() as tx:
            for name in spec.names:
                await _check_free(tx, name)
            columns = _columns(spec) | {"state": ModelState.REGISTERED, "created_at": self._now()}
            await tx.insert("models", columns)
            await _insert_aliases(tx, spec.name, spec.aliases)
            for name_row in spec.further:
                await _insert_further(tx, spec.name, name_row)
            return await _row(tx, spec.name)

    async def get(self, name_or_alias: str) -> ModelRow | None:
        """Return the model with this name or alias, or None."""
        row = await self._db.fetch_one(_FIND, (storable(name_or_alias),))
        if row is None:
            return None
        return _model_row(row, await profiles_of(self._db, row["name"]))

    async def list(self) -> list[ModelRow]:
        if self._listed is not None:
            return [*self._listed]
        num_changes = self._num_changes
        profiles = await all_profiles(self._db)
        rows = await self._db.fetch_all(f"{_SELECT} ORDER BY name")
        listed = [_model_row(row, profiles.get(row["name"], ())) for row in rows]
        # A list read before a change, or during a change, is not cached.
        if num_changes == self._num_changes:
            self._listed = tuple(listed)
        return listed

    async def update(
        self,
        name: str,
        *,
        targets: Targets | None = None,
        add_aliases: Iterable[str] = (),
        remove_aliases: Iterable[str] = (),
        pace: str | None = None,
    ) -> ModelRow:
        """Change a model's targets, pace and aliases in one transaction; None keeps a value.

        Aliases are removed before new aliases are added, so one call can replace aliases.

        Raises:
            NoSuchModel: no model has this name.
            UsageError: an alias is invalid.
            Refused: an alias to add is taken, or an alias to remove is not this model's.
        """
        added, removed = tuple(add_aliases), tuple(remove_aliases)
        check_names(added)
        async with self._changing() as tx:
            await _check_model(tx, name)
            if targets is not None:
                await tx.update(
                    "models", {"name": name}, ttft_s=targets.ttft_s, tbt_s=targets.tbt_s
                )
            if pace is not None:
                await tx.update("models", {"name": name}, pace=pace)
            for alias in removed:
                await _delete_alias(tx, name, alias)
            for alias in added:
                await _check_free(tx, alias)
            await _insert_aliases(tx, name, added)
            return await _row(tx, name)

    async def add_further(self, model: str, further: Preset | Adapter) -> ModelRow:
        """Add a preset or an adapter to a model.

        Raises:
            NoSuchModel: no model has this name.
            UsageError: the further name is malformed.
            Refused: the further name is taken.
        """
        check_names((further.name,))
        async with self._changing() as tx:
            await _check_model(tx, model)
            await _check_free(tx, further.name)
            await _insert_further(tx, model, further)
            return await _row(tx, model)

    async def remove_further(self, name: str) -> ModelRow:
        """Remove a preset or an adapter; return its model."""
        async with self._changing() as tx:
            owner = await _owner(tx, name)
            mine = "DELETE FROM aliases WHERE alias = ? AND kind != 'alias'"
            if owner is None or not await tx.execute(mine, (storable(name),)):
                raise NoSuchModel(
                    f"no preset or adapter is named {storable(name)!r}", "see `gpupool list`"
                )
            return await _row(tx, owner)

    async def set_engine(self, name: str, engine: Mapping[str, str]) -> ModelRow:
        """Replace a model's options of the engine."""
        return await self._set(name, engine=json.dumps(dict(engine)))

    async def set_devices(self, name: str, devices: Sequence[int]) -> ModelRow:
        """Record the devices chosen by hand for a model's engines; empty for no choice."""
        return await self._set(name, devices=json.dumps([*devices]))

    async def set_engine_bytes(self, name: str, device: str, num_bytes: int) -> None:
        """Record the memory of a model's engine outside the pages of a kind of device."""
        async with self._changing() as tx:
            await _check_model(tx, name)
            sizes = {**(await _row(tx, name)).engine_bytes, device: num_bytes}
            await tx.update("models", {"name": name}, engine_bytes=json.dumps(sizes))

    async def set_state(self, name: str, state: ModelState, error: str = "") -> ModelRow:
        """Record a model's state, and the reason of a failure."""
        return await self._set(name, state=state, error=storable(error))

    async def set_loaded(
        self,
        name: str,
        *,
        architecture: str,
        weight_bytes: int,
        kv_bytes_per_token: int,
        max_model_len: int,
    ) -> ModelRow:
        """Record the facts found by a load; ``max_model_len`` is the engine's limit in tokens.

        Does not change the state.
        """
        return await self._set(
            name,
            architecture=architecture,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            loaded_max_model_len=max_model_len,
        )

    async def set_pinned(self, name: str, is_pinned: bool) -> ModelRow:
        """Record whether a model's weights snapshot must stay in host memory."""
        return await self._set(name, is_pinned=is_pinned)

    async def set_profiles(self, name: str, rows: Sequence[ProfileRow]) -> ModelRow:
        """Replace a model's profiles on the devices named in ``rows``."""
        async with self._changing() as tx:
            await _check_model(tx, name)
            await replace_profiles(tx, name, rows)
            return await _row(tx, name)

    async def remove(self, name: str) -> None:
        """Remove a model with the aliases and profiles; the history stays."""
        async with self._changing() as tx:
            await _check_model(tx, name)
            await tx.execute("DELETE FROM models WHERE name = ?", (name,))

    async def _set(self, name: str, **columns: Value) -> ModelRow:
        async with self._changing() as tx:
            await _check_model(tx, name)
            await tx.update("models", {"name": name}, **columns)
            return await _row(tx, name)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[Transaction]:
        try:
            async with self._db.write() as tx:
                yield tx
        finally:
            self._num_changes += 1
            self._listed = None


def _check_spec(spec: ModelSpec) -> None:
    check_names(spec.names)
    for text in (spec.source, spec.path):
        if storable(text) != text:
            raise UsageError(
                f"the path {storable(text)!r} of model {spec.name!r} is not valid UTF-8",
                "rename the folder, or make a link with a plain name",
            )


def check_names(names: tuple[str, ...]) -> None:
    """Check a model's name and aliases for validity, not for availability.

    Raises:
        UsageError: a name is malformed or repeated.
    """
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{storable(name)!r} cannot be the name or alias of a model",
                "use 1 to 128 letters, digits and . _ : / - and begin with a letter or digit",
            )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"{', '.join(repeated)} is given more than once", "name each alias once")


async def _owner(tx: Transaction, name: str) -> str | None:
    row = await tx.fetch_one(
        "SELECT name FROM models WHERE name = ?1 UNION ALL "
        "SELECT model FROM aliases WHERE alias = ?1",
        (storable(name),),
    )
    return None if row is None else str(row["name"])


async def _check_free(tx: Transaction, name: str) -> None:
    owner = await _owner(tx, name)
    if owner == name:
        raise Refused(
            f"a model named {name!r} is already registered",
            "choose another name, or remove the registered model first",
        )
    if owner is not None:
        raise Refused(
            f"{name!r} is already an alias of model {owner!r}",
            f"choose another name, or remove the alias from {owner!r} first",
        )


async def _check_model(tx: Transaction, name: str) -> None:
    owner = await _owner(tx, name)
    if owner is None:
        raise NoSuchModel(f"no model is named {storable(name)!r}", "see `gpupool list`")
    if owner != name:
        raise NoSuchModel(
            f"no model is named {name!r}; {name!r} is an alias of {owner!r}", f"use {owner!r}"
        )


async def _insert_aliases(tx: Transaction, name: str, aliases: tuple[str, ...]) -> None:
    await tx.execute_many(
        "INSERT INTO aliases (alias, model) VALUES (?, ?)", [(alias, name) for alias in aliases]
    )


async def _delete_alias(tx: Transaction, name: str, alias: str) -> None:
    own = (storable(alias), name)
    plain = "DELETE FROM aliases WHERE alias = ? AND model = ? AND kind = 'alias'"
    if not await tx.execute(plain, own):
        raise Refused(
            f"{storable(alias)!r} is not an alias of model {name!r}",
            f"see `gpupool show {name}` for the model's aliases",
        )


async def _row(tx: Transaction, name: str) -> ModelRow:
    (row,) = await tx.fetch_all(_FIND, (name,))
    return _model_row(row, await profiles_of(tx, row["name"]))


def _columns(spec: ModelSpec) -> dict[str, Value]:
    plain = {name: getattr(spec, name) for name in _PLAIN}
    return plain | {
        "engine": json.dumps(spec.engine),
        "devices": json.dumps([*spec.devices]),
        "ttft_s": spec.targets.ttft_s,
        "tbt_s": spec.targets.tbt_s,
    }


def _model_row(row: sqlite3.Row, profiles: tuple[ProfileRow, ...]) -> ModelRow:
    further: dict[str, list[dict[str, Any]]] = {"preset": [], "adapter": []}
    for kind, name, details in json.loads(row["further"]):
        further[kind].append({"name": name, **json.loads(details)})
    plain: dict[str, Any] = {name: row[name] for name in _PLAIN}
    spec = ModelSpec(
        **plain,
        targets=Targets(ttft_s=row["ttft_s"], tbt_s=row["tbt_s"]),
        aliases=tuple((row["aliases"] or "").split()),
        engine=json.loads(row["engine"]),
        presets=tuple(Preset(**preset) for preset in further["preset"]),
        adapters=tuple(Adapter(**adapter) for adapter in further["adapter"]),
        devices=tuple(json.loads(row["devices"])),
    )
    return ModelRow(
        spec=spec,
        state=ModelState(row["state"]),
        error=row["error"],
        architecture=row["architecture"],
        weight_bytes=row["weight_bytes"],
        kv_bytes_per_token=row["kv_bytes_per_token"],
        loaded_max_model_len=row["loaded_max_model_len"],
        created_at=row["created_at"],
        profiles=profiles,
        is_pinned=bool(row["is_pinned"]),
        engine_bytes=json.loads(row["engine_bytes"]),
    )


async def _insert_further(tx: Transaction, model: str, further: Preset | Adapter) -> None:
    details = asdict(further)
    name = details.pop("name")
    kind = "preset" if isinstance(further, Preset) else "adapter"
    row = {"alias": name, "model": model, "kind": kind, "details": json.dumps(details)}
    await tx.insert("aliases", row)


class KnownDivisions:
    """The numbers of GPUs that cannot divide a model, with vLLM's reason, by version of vLLM.

    The verdicts on a model end with the model, and with a change of its options.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    async def of_version(self, engine_version: str) -> dict[str, dict[int, str]]:
        """Return the reasons of a version of vLLM, by model and number of GPUs."""
        rows = await self._db.fetch_all(
            "SELECT model, degree, reason FROM divisions WHERE engine_version = ?",
            (engine_version,),
        )
        found: dict[str, dict[int, str]] = {}
        for row in rows:
            found.setdefault(row["model"], {})[row["degree"]] = row["reason"]
        return found

    async def replace(self, model: str, engine_version: str, reasons: Mapping[int, str]) -> None:
        """Replace the verdicts on a model; no effect on a model that is not registered."""
        async with self._db.write() as tx:
            await tx.execute("DELETE FROM divisions WHERE model = ?", (model,))
            values = [(model, engine_version, degree, why) for degree, why in reasons.items()]
            await tx.execute_many(_INSERT_DIVISION, values)
