"""API keys in the database, without secrets."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpupool_state.db import Database, Source, Transaction, storable
from gpupoold.api_keys import KeyFacts, KeyPowers
from gpupoold.errors import NoSuchKey, Refused, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/-]{0,63}")
_POWERS = tuple(field.name for field in fields(KeyPowers))


@dataclass(frozen=True, kw_only=True)
class KeyRow(KeyFacts):
    """A stored key.

    ``digest`` is the hash of the secret. After a rotation ``previous_digest`` is the hash of the
    former secret, valid until ``previous_until``. The row of a revoked key stays, without hashes,
    so that the history can show the name.
    """

    digest: str
    previous_digest: str | None = None
    powers: KeyPowers


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key's use since the last call of ``ApiKeys.note_use``."""

    key_id: str
    num_requests: int
    num_tokens: int
    last_used_at: float


class ApiKeys:
    """API keys in the database; a change is on disk when the call returns.

    The name of a revoked key is free again. All methods raise ``Failed``, and change nothing, if
    the disk is full or the database is locked or damaged.
    """

    def __init__(self, db: Database, now: Callable[[], float] = time.time) -> None:
        self._db = db
        self._now = now

    async def list(self, *, with_revoked: bool = False) -> list[KeyRow]:
        """Return all keys by name; revoked keys last."""
        where = "" if with_revoked else "WHERE revoked_at IS NULL"
        rows = await self._db.fetch_all(
            f"SELECT * FROM api_keys {where} ORDER BY revoked_at IS NOT NULL, name, revoked_at"
        )
        return [_key_row(row) for row in rows]

    async def find(self, name: str) -> KeyRow:
        """Return the valid key of this name."""
        return await _find(self._db, name)

    async def add(self, key_id: str, name: str, digest: str, powers: KeyPowers) -> KeyRow:
        """Store a new key.

        Raises:
            UsageError: the name is invalid.
            Refused: another key has the name.
        """
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{storable(name)!r} cannot be the name of a key",
                "use 1 to 64 letters, digits and . _ @ : / - and begin with a letter or digit",
            )
        async with self._db.write() as tx:
            if await tx.fetch_one(_FIND, (name,)):
                raise Refused(
                    f"a key named {name!r} exists",
                    "choose another name, or give the existing key a new secret: "
                    f"`gpupool key rotate {name}`",
                )
            values = {"id": key_id, "name": name, "digest": digest, "created_at": self._now()}
            await tx.insert("api_keys", values | _columns(powers))
            return await _find(tx, name)

    async def set(self, name: str, powers: KeyPowers) -> KeyRow:
        """Change a key's rights and limits, not the secret."""
        return await self._update(name, _columns(powers))

    async def rotate(self, name: str, digest: str, previous_until: float | None) -> KeyRow:
        """Replace a key's secret; the former secret stays valid until ``previous_until``.

        With None the former secret is invalid at once.
        """
        async with self._db.write() as tx:
            known = await _find(tx, name)
            values = {
                "digest": digest,
                "previous_digest": None if previous_until is None else known.digest,
                "previous_until": previous_until,
                "rotated_at": self._now(),
            }
            return await _update(tx, known.id, values)

    async def revoke(self, name: str) -> KeyRow:
        """Revoke a key and delete its hashes."""
        gone = {"digest": "", "previous_digest": None, "previous_until": None}
        return await self._update(name, gone | {"revoked_at": self._now()})

    async def note_use(self, uses: Iterable[KeyUse]) -> None:
        """Add to the keys' counts; a power failure may lose the last additions."""
        rows = [(u.num_requests, u.num_tokens, u.last_used_at, u.key_id) for u in uses]
        async with self._db.write(durable=False) as tx:
            await tx.execute_many(
                "UPDATE api_keys SET num_requests = num_requests + ?,"
                " num_tokens = num_tokens + ?, last_used_at = ? WHERE id = ?",
                rows,
            )

    async def _update(self, name: str, values: dict[str, Any]) -> KeyRow:
        async with self._db.write() as tx:
            return await _update(tx, (await _find(tx, name)).id, values)


_FIND = "SELECT * FROM api_keys WHERE name = ? AND revoked_at IS NULL"


async def _find(source: Source, name: str) -> KeyRow:
    rows: Sequence[sqlite3.Row] = await source.fetch_all(_FIND, (storable(name),))
    if not rows:
        raise NoSuchKey(f"no API key is named {storable(name)!r}", "see `gpupool key ls`")
    return _key_row(rows[0])


async def _update(tx: Transaction, key_id: str, values: dict[str, Any]) -> KeyRow:
    await tx.update("api_keys", {"id": key_id}, **values)
    (row,) = await tx.fetch_all("SELECT * FROM api_keys WHERE id = ?", (key_id,))
    return _key_row(row)


def _columns(powers: KeyPowers) -> dict[str, Any]:
    # A space cannot be part of a model's name, so a space can separate the names.
    models = None if powers.models is None else " ".join(powers.models)
    return vars(powers) | {"models": models}


def _key_row(row: sqlite3.Row) -> KeyRow:
    models = None if row["models"] is None else tuple(row["models"].split())
    values = dict(row) | {"models": models}
    powers = KeyPowers(**{name: values.pop(name) for name in _POWERS})
    return KeyRow(powers=powers, **values)
