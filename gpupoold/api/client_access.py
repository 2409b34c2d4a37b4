"""Calls of the admin API about API keys and the batches of clients."""

from __future__ import annotations

from urllib.parse import quote

from pydantic import TypeAdapter

from gpupoold.api.calls import AdminCalls
from gpupoold.api.schemas_access import (
    AddKeyRequest,
    KeyInfo,
    NewKey,
    RotateKeyRequest,
    SetKeyRequest,
)
from gpupoold.api.schemas_batches import BatchInfo

_KEY = TypeAdapter(KeyInfo)
_KEYS = TypeAdapter(list[KeyInfo])
_NEW_KEY = TypeAdapter(NewKey)
_BATCHES = TypeAdapter(list[BatchInfo])


class KeyCalls(AdminCalls):
    """API keys; errors as of :class:`gpupoold.api.client.AdminClient`."""

    def api_keys(self, *, with_revoked: bool = False) -> list[KeyInfo]:
        """Return all API keys by name, with their use."""
        query = {"revoked": "true"} if with_revoked else None
        return self._call(_KEYS, "GET", "/keys", query=query)

    def batches(self, limit: int, *, with_ended: bool = False) -> list[BatchInfo]:
        """Return the latest batches of all keys."""
        query = {"limit": limit, "ended": "true" if with_ended else "false"}
        return self._call(_BATCHES, "GET", "/batches", query=query)

    def add_key(self, request: AddKeyRequest) -> NewKey:
        """Create a key; only this answer contains the key's text.

        Raises:
            UsageError, Refused: the name is invalid or taken.
            NoSuchModel: the key names an unknown model.
        """
        return self._call(_NEW_KEY, "POST", "/keys", body=request)

    def set_key(self, name: str, request: SetKeyRequest) -> KeyInfo:
        """Change a key's rights and limits, from the next request on.

        Raises:
            NoSuchKey, NoSuchModel: there is no such key or model.
        """
        return self._call(_KEY, "PATCH", _path(name), body=request)

    def rotate_key(self, name: str, grace_s: float) -> NewKey:
        """Give a key a new secret; the old secret stays valid for ``grace_s`` seconds.

        Raises:
            NoSuchKey: there is no key of this name.
        """
        body = RotateKeyRequest(grace_s=grace_s)
        return self._call(_NEW_KEY, "POST", f"{_path(name)}/rotate", body=body)

    def remove_key(self, name: str) -> KeyInfo:
        """Revoke a key; the key's running requests continue.

        Raises:
            NoSuchKey: there is no key of this name.
        """
        return self._call(_KEY, "DELETE", _path(name))


def _path(name: str) -> str:
    return f"/keys/{quote(name, safe='/')}"
