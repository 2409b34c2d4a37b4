"""Callers: API keys are checked before any other work for a request.

The daemon sends the keys and counts their use: for a key with limits the daemon must permit each
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpupoold.access import secret
from gpupoold.domain import Priority
from gpupoold.frontend.catalog import Scope as ModelScope
from gpupoold.frontend.daemon_calls import RateCalls
from gpupoold.frontend.errors import ApiError, starting
from gpupoold.frontend.request_bounds import RequestLocal
from gpupoold.wire.messages import (
    AccessReport,
    AccessRules,
    AddRequest,
    KeyRecord,
    ServedModel,
)

_NO_KEY = (
    "You did not provide an API key. "
    "Send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`."
)
_WRONG_KEY = "The API key you provided is not valid."
_EXPIRED_KEY = "The API key you provided has expired."


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; without a key all models and any rate are allowed."""

    key: KeyRecord | None = None
    models: ModelScope = None
    prefix_owner: str = ""
    """Requests use cached KV of requests with the same owner only."""
    is_batch: bool = False
    """Requests have background priority."""

    @property
    def pace(self) -> str:
        """The pace of the key's streams, empty without one."""
        return "" if self.key is None else self.key.pace

    @property
    def key_id(self) -> str:
        """Id of the key, "" without one."""
        return "" if self.key is None else self.key.id

    def max_requests(self, max_live: int) -> int:
        """Return the caller's limit of live requests, where ``max_live`` is the general limit."""
        of_key = None if self.key is None else self.key.max_live
        return max_live if of_key is None else min(of_key, max_live)

    def check_metrics(self) -> None:
        """Check that the caller may read the metrics, which cover all models."""
        if self.models:
            raise ApiError(
                403,
                "This API key is for some models, and the metrics are of all.",
                kind="invalid_request_error",
                code="insufficient_permissions",
            )


class Callers:
    """The present keys; for the event loop. ``rates`` asks for remaining rates."""

    def __init__(self, rates: RateCalls, wall_clock: Callable[[], float] = time.time) -> None:
        self._rates = rates
        self._wall_clock = wall_clock
        self._are_required: bool | None = None  # None before the daemon's first message
        self._by_id: dict[str, Caller] = {}
        self._anybody = Caller()
        self._num_unauthorised = 0
        self.host_names: frozenset[str] = frozenset()
        self.allowed_origins: frozenset[str] = frozenset()
        self.known = asyncio.Event()
        """Set when the keys are known."""

    def replace(self, rules: AccessRules) -> None:
        """Replace the rules. Running requests continue under any rules."""
        self._by_id = {key.id: _caller(key, rules.share_prefixes) for key in rules.keys}
        self._are_required = rules.are_required
        self.host_names = frozenset(rules.host_names)
        self.allowed_origins = frozenset(rules.allowed_origins)
        self.known.set()

    def of_batch(self, owner: str) -> Caller | None:
        """Return the caller of a batch's requests, None if the owner may send none any more.

        ``owner`` is the id of the key that the batch was created with, empty without one.
        """
        if not owner:
            return None if self._are_required else replace(self._anybody, is_batch=True)
        caller = self._by_id.get(owner)
        if caller is None or caller.key is None:
            return None
        expires_at = caller.key.expires_at
        is_expired = expires_at is not None and self._wall_clock() >= expires_at
        return None if is_expired else replace(caller, is_batch=True)

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Return the caller of a request with these headers.

        A key is checked even where none is needed; a text without the form of a key is then
        ignored, because clients always send some text.

        Raises:
            ApiError: 401 without a valid key; 503 before the daemon has sent the keys.
        """
        if self._are_required is None:
            raise starting()
        sent = list(secret.sent_in(headers))
        for text in sent:
            key_id = secret.id_of(text)
            if key_id is not None:
                return self._checked(key_id, text)
        if not self._are_required:
            return self._anybody
        raise self._unauthorised(_WRONG_KEY if sent else _NO_KEY)

    async def begin(self, caller: Caller) -> None:
        """Count a request about to be served.

        Raises:
            ApiError: 429: too many requests or tokens in too short a time; 503: the rates are
                unknown now.
        """
        if caller.key is not None and caller.key.is_rate_limited:
            await self._rates.begin(caller.key)

    def asked(self, message: AddRequest) -> None:
        """Add the present caller and preset to a message for the daemon."""
        caller, preset = _current.get() or (self._anybody, "")
        if caller.key is not None:
            message.key_id, message.priority = caller.key.id, Priority(caller.key.priority)
        if caller.is_batch:
            message.priority = Priority.BACKGROUND
        message.served_name = message.served_name or preset

    def report(self) -> AccessReport | None:
        """Return the changes since the last report, None without any."""
        if not self._num_unauthorised:
            return None
        num_unauthorised, self._num_unauthorised = self._num_unauthorised, 0
        return AccessReport(num_unauthorised)

    def _checked(self, key_id: str, text: str) -> Caller:
        caller = self._by_id.get(key_id)
        if caller is None or caller.key is None:
            raise self._unauthorised(_WRONG_KEY)
        key, now = caller.key, self._wall_clock()
        digests = [key.digest]
        if key.previous_digest and now < key.previous_until:
            digests.append(key.previous_digest)
        if not any(secret.matches(text, digest) for digest in digests):
            raise self._unauthorised(_WRONG_KEY)
        if key.expires_at is not None and now >= key.expires_at:
            raise self._unauthorised(_EXPIRED_KEY)
        return caller

    def _unauthorised(self, message: str) -> ApiError:
        self._num_unauthorised += 1
        return ApiError(401, message)


# The caller, and the name of the preset, empty without one.
_current: RequestLocal[tuple[Caller, str]] = RequestLocal("caller")


def serving(caller: Caller, model: ServedModel) -> contextlib.AbstractContextManager[None]:
    """Attribute work inside the context, including new tasks, to a caller and a preset, if any."""
    return _current.holding((caller, "" if model.preset is None else model.preset.name))


def current_key_id() -> str:
    """Return the key's id of the present request; empty without one."""
    current = _current.get()
    return "" if current is None else current[0].key_id


def cache_salt(of_client: str | None) -> str | None:
    """Return the salt of the present request's cached KV; ``of_client`` is the client's own salt.

    The owner is a part of the salt: a client's own salt finds no KV of other owners.
    """
    current = _current.get()
    owner = "" if current is None else current[0].prefix_owner
    return f"{owner}:{of_client or ''}" if owner or of_client else None


def without_credentials(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the same request without its key, for other applications."""
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    if not any(name in secret.HEADERS for name, _ in headers):
        return scope
    kept = [header for header in headers if header[0] not in secret.HEADERS]
    return {**scope, "headers": kept}


def _caller(key: KeyRecord, share_prefixes: bool) -> Caller:
    models = None if key.models is None else frozenset(key.models)
    return Caller(key, models, "" if share_prefixes else key.id)
