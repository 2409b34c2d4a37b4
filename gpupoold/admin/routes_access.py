"""``/keys``: API keys."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import FastAPI

from gpupool_state import KeyPowers, KeyRow
from gpupoold.api.schemas_access import (
    AddKeyRequest,
    KeyInfo,
    NewKey,
    RotateKeyRequest,
    SetKeyRequest,
)
from gpupoold.control.access.keyring import Keyring
from gpupoold.control.control_plane import ControlPlane
from gpupoold.domain import Priority
from gpupoold.errors import UsageError


def add_access_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the routes of API keys, see :mod:`gpupoold.control.access.keyring`."""
    keyring = control_plane.keyring

    @app.get("/keys")
    async def list_keys(revoked: bool = False) -> list[KeyInfo]:
        return [_info(keyring, row) for row in await keyring.list(with_revoked=revoked)]

    @app.post("/keys")
    async def add_key(body: AddKeyRequest) -> NewKey:
        _check_expiry(body.expires_at)
        if bool(body.id) != bool(body.digest):
            raise UsageError("a key of the fleet has an id and a digest", "send both or none")
        if body.id:
            row = await keyring.adopt(body.id, body.name, body.digest, _powers(body))
            return NewKey(key=_info(keyring, row), text="")
        row, text = await keyring.add(body.name, _powers(body))
        return NewKey(key=_info(keyring, row), text=text)

    @app.post("/keys/{name:path}/rotate")
    async def rotate_key(name: str, body: RotateKeyRequest) -> NewKey:
        row, text = await keyring.rotate(name, body.grace_s)
        return NewKey(key=_info(keyring, row), text=text)

    @app.patch("/keys/{name:path}")
    async def set_key(name: str, body: SetKeyRequest) -> KeyInfo:
        _check_expiry(body.expires_at)
        known = await keyring.find(name)
        return _info(keyring, await keyring.set(name, _changed(known.powers, body)))

    @app.delete("/keys/{name:path}")
    async def remove_key(name: str) -> KeyInfo:
        return _info(keyring, await keyring.revoke(name))


def _powers(body: AddKeyRequest) -> KeyPowers:
    return KeyPowers(
        None if body.models is None else tuple(body.models),
        Priority(body.priority),
        body.requests_per_minute,
        body.tokens_per_minute,
        body.max_live,
        body.expires_at,
        body.pace,
    )


def _changed(powers: KeyPowers, body: SetKeyRequest) -> KeyPowers:
    """Return ``powers`` with the values that the body gives; 0 removes a limit."""
    changes: dict[str, Any] = {"models": None} if body.all_models else {}
    if body.models is not None:
        changes["models"] = tuple(body.models)
    if body.priority is not None:
        changes["priority"] = Priority(body.priority)
    for name in ("requests_per_minute", "tokens_per_minute", "max_live", "expires_at"):
        value = getattr(body, name)
        if value is not None:
            changes[name] = value or None
    if body.pace is not None:
        changes["pace"] = body.pace
    return dataclasses.replace(powers, **changes)


def _check_expiry(expires_at: float | None) -> None:
    if expires_at and expires_at <= time.time():
        raise UsageError("the key would have expired already", "give a time in the future")


def _info(keyring: Keyring, row: KeyRow) -> KeyInfo:
    powers, left = dataclasses.asdict(row.powers), keyring.left(row)
    known = powers | {"requests_left": left.requests, "tokens_left": left.tokens}
    others = {name: getattr(row, name) for name in KeyInfo.model_fields.keys() - known.keys()}
    return KeyInfo.model_validate(known | others)
