"""The actions that change the state database."""

from __future__ import annotations

import sqlite3
from typing import Any

from gpupool_state import (
    DATABASE_NAME,
    ApiKeys,
    Database,
    History,
    ProfilePhase,
    ProfileRow,
    Registry,
)
from gpupoold.api_keys import KeyPowers
from gpupoold.domain import ModelName, ModelSpec, ModelState, Targets
from gpupoold.errors import Failed, GpupoolError
from tests.syscall_faults.injector import Scenario

SPEC = ModelSpec(
    name=ModelName("a"),
    source="org/a",
    path="/models/a",
    revision="main",
    dtype="bfloat16",
    max_model_len=4096,
    targets=Targets(ttft_s=2.0, tbt_s=0.05),
    aliases=("b", "c"),
)


class StateChanged(Scenario):
    """A transaction on the state database; the subclasses say which."""

    errors: tuple[type[BaseException], ...] = (Failed,)

    async def prepare(self) -> None:
        self._path = self.folder / DATABASE_NAME
        self.database = await Database.open(self._path)
        self.registry = Registry(self.database, now=lambda: 1.0)
        self.keys = ApiKeys(self.database, now=lambda: 1.0)

    async def state(self) -> Any:
        # What another program sees, as the daemon that starts next.
        with sqlite3.connect(self._path) as reader:
            tables = [name for (name,) in reader.execute("SELECT name FROM sqlite_master")]
            found = {
                table: reader.execute(f"SELECT * FROM {table}").fetchall()
                for table in ("models", "aliases", "profiles", "api_keys", "requests", "events")
                if table in tables
            }
        reader.close()
        return found

    async def close(self) -> None:
        await self.database.close()


class ModelAdded(StateChanged):
    """A model with two aliases is registered."""

    async def act(self) -> None:
        if await self.registry.get("a") is None:
            await self.registry.add(SPEC)


class ModelChanged(ModelAdded):
    """A model is loaded and its profile is stored."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.registry.add(SPEC)

    async def act(self) -> None:
        rows = [
            ProfileRow(
                law="Law",
                constants=(1.0, 2.0),
                device="emulated",
                phase=phase,
                engine_version="0.32.0",
                revision="main",
                dtype="float32",
                measured_at=2.0,
            )
            for phase in ProfilePhase
        ]
        await self.registry.set_profiles("a", rows)


class ModelRemoved(ModelChanged):
    """A model goes with its aliases and profiles."""

    async def prepare(self) -> None:
        await super().prepare()
        await super().act()

    async def act(self) -> None:
        if await self.registry.get("a") is not None:
            await self.registry.remove("a")


class ModelFailed(ModelChanged):
    """A model's state is set."""

    async def act(self) -> None:
        await self.registry.set_state("a", ModelState.FAILED, "no memory")


class KeyAdded(StateChanged):
    """A key is made."""

    async def act(self) -> None:
        if not await self.keys.list():
            await self.keys.add("id", "web", "0" * 64, KeyPowers())


class KeyRotated(KeyAdded):
    """A key gets a new secret, and ends."""

    async def prepare(self) -> None:
        await super().prepare()
        await super().act()

    async def act(self) -> None:
        await self.keys.rotate("web", "1" * 64, 3600.0)


class KeyRevoked(KeyRotated):
    """A key ends."""

    async def act(self) -> None:
        if await self.keys.list():
            await self.keys.revoke("web")


class EventWritten(StateChanged):
    """An event reaches the disk, at the next try if not at once."""

    is_best_effort = True

    async def prepare(self) -> None:
        await super().prepare()
        self._history = History(self.database, flush_interval_s=3600, now=lambda: 1.0)
        await self._history.start()
        self._history.record_event("info", "model_added", "a", "text")

    async def act(self) -> None:
        await self._history.flush()

    async def state(self) -> Any:
        # That the history could not be written is an event too.
        return [row for row in (await super().state())["events"] if row[3] == "model_added"]

    async def close(self) -> None:
        await self._history.stop()
        await super().close()


class DatabaseMade(StateChanged):
    """A state database is made, with all its tables."""

    errors = (GpupoolError,)

    async def prepare(self) -> None:
        self._path = self.folder / DATABASE_NAME

    async def act(self) -> None:
        await (await Database.open(self._path)).close()

    async def state(self) -> Any:
        if not self._path.exists():
            return False
        reader = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)
        try:
            [(version,)] = reader.execute("PRAGMA user_version").fetchall()
        finally:
            reader.close()
        return version > 0

    async def close(self) -> None:
        pass
