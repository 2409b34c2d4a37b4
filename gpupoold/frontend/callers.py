"""Who asks: API keys are checked here, before anything is read or done for a request.

The daemon tells which keys there are. What a key has left of its rates lives here, since here
is known at once what is used; the daemon is told about once a second and gives it to the next
frontend, so that a restart makes nobody's minute begin anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from gpupoold.access import secret
from gpupoold.access.bucket import Bucket
from gpupoold.frontend.catalog import Scope as ModelScope
from gpupoold.frontend.errors import (
    ApiError,
    not_permitted,
    over_rate,
    starting,
    unauthorised,
)
from gpupoold.units import format_duration
from gpupoold.wire.messages import (
    AccessReport,
    AccessRules,
    AddRequest,
    KeyLevels,
    KeyRecord,
    StepOutputs,
)

_BEARER = b"bearer "
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})

_NO_KEY = (
    "You did not provide an API key. "
    "Send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`."
)
_WRONG_KEY = "The API key you provided is not valid."
_EXPIRED_KEY = "The API key you provided has expired."


@dataclass(eq=False, slots=True)
class Caller:
    """Who sent a request; without a key it may ask all models as often as it likes."""

    key: KeyRecord | None = None
    models: ModelScope = None
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def check_metrics(self) -> None:
        """See that the metrics, which tell of all models, are for this caller.

        Raises:
            ApiError: 403.
        """
        if self.models:
            raise not_permitted("This API key is for some models, and the metrics are of all.")


class Callers:
    """The keys that there are, and what is left of their rates; lives on the event loop."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._now_s = now_s
        self._wall_clock = wall_clock
        self._are_required: bool | None = None  # None: the daemon has not said yet
        self._by_id: dict[str, Caller] = {}
        self._anybody = Caller()
        self._charged: dict[str, Caller] = {}  # of live requests whose tokens count
        self._used: set[str] = set()
        self._num_unauthorised = 0

    def replace(self, rules: AccessRules) -> None:
        """Take these rules from now on. Requests under way go on, whatever they say."""
        old, self._by_id = self._by_id, {}
        for key in rules.keys:
            self._by_id[key.id] = self._caller(key, old.get(key.id), rules.levels.get(key.id))
        self._are_required = rules.are_required

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who sends these headers.

        A key that is sent is looked at even where none is needed; but what has not even the
        form of one is not, since clients insist on sending something.

        Raises:
            ApiError: 401 without a valid key; 503 before the daemon has named the keys.
        """
        if self._are_required is None:
            raise starting()
        sent = list(_credentials(headers))
        for text in sent:
            key_id = secret.id_of(text)
            if key_id is not None:
                return self._checked(key_id, text)
        if not self._are_required:
            return self._anybody
        raise self._unauthorised(_WRONG_KEY if sent else _NO_KEY)

    def begin(self, caller: Caller) -> None:
        """A request is about to be served; it counts, whatever becomes of it.

        Raises:
            ApiError: 429: too many requests or tokens in too short a time.
        """
        now_s, key = self._now_s(), caller.key
        if key is None:
            return
        longest_s, limit = 0.0, ""
        for bucket, what in ((caller.requests, "requests"), (caller.tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(1, now_s)
            if bucket is not None and wait_s > longest_s:
                longest_s, limit = wait_s, f"{bucket.per_minute} {what} per minute"
        if longest_s:
            raise over_rate(
                f"Rate limit reached for the API key `{key.name}`: {limit}. "
                f"Try again in {format_duration(longest_s)}.",
                longest_s,
            )
        if caller.requests is not None:
            caller.requests.take(1, now_s)
            self._used.add(key.id)

    def asked(self, message: AddRequest) -> None:
        """The daemon is going to be asked: tell it for whom, and charge the prompt."""
        caller = _current.get()
        if caller is None or caller.key is None:
            return
        message.key_id, message.priority = caller.key.id, caller.key.priority
        if caller.tokens is not None:
            self._charged[message.request_id] = caller
            self._charge(caller, message.num_prompt_tokens)

    def stepped(self, outputs: StepOutputs) -> None:
        """Charge the tokens of answers."""
        if not self._charged:
            return
        num_tokens: dict[Caller, int] = {}
        for item in outputs.progress:
            caller = self._charged.get(item.request_id)
            if caller is not None:
                num_tokens[caller] = num_tokens.get(caller, 0) + len(item.new_token_ids)
                if item.finish_reason is not None:
                    del self._charged[item.request_id]
        for caller, number in num_tokens.items():
            self._charge(caller, number)

    def ended(self, request_ids: Iterable[str]) -> None:
        """No more tokens will come of these."""
        for request_id in request_ids:
            self._charged.pop(request_id, None)

    def report(self) -> AccessReport | None:
        """What has changed since the last report; None: nothing."""
        if not self._used and not self._num_unauthorised:
            return None
        now_s = self._now_s()
        used, self._used = self._used, set()
        levels = {one: _levels(self._by_id[one], now_s) for one in used if one in self._by_id}
        num_unauthorised, self._num_unauthorised = self._num_unauthorised, 0
        return AccessReport(levels, num_unauthorised)

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
        return unauthorised(message)

    def _charge(self, caller: Caller, num_tokens: int) -> None:
        # The key may have other limits by now, or be gone: requests under way do not matter then.
        assert caller.key is not None
        known = self._by_id.get(caller.key.id)
        if known is not None and known.tokens is not None:
            known.tokens.take(num_tokens, self._now_s())
            self._used.add(caller.key.id)

    def _caller(self, key: KeyRecord, old: Caller | None, told: KeyLevels | None) -> Caller:
        """The key's buckets as they were here, or else as the frontend before told."""
        now_s = self._now_s()
        if old is not None:
            told = _levels(old, now_s)
        told = told or KeyLevels(now_s)
        return Caller(
            key,
            None if key.models is None else frozenset(key.models),
            _bucket(key.requests_per_minute, told.requests, told.at_s),
            _bucket(key.tokens_per_minute, told.tokens, told.at_s),
        )


_current: ContextVar[Caller | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def serving(caller: Caller) -> Iterator[None]:
    """What happens within is done for this caller, in the tasks that are begun there too."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)


def without_credentials(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The same request as those see it who have no business with its key."""
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    if not any(name in _CREDENTIALS for name, _ in headers):
        return scope
    kept = [header for header in headers if header[0] not in _CREDENTIALS]
    return {**scope, "headers": kept}


def _credentials(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.decode("latin-1").strip()
        elif name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :].decode("latin-1").strip()


def _bucket(per_minute: int | None, level: float | None, at_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, at_s, level)


def _levels(caller: Caller, now_s: float) -> KeyLevels:
    requests, tokens = caller.requests, caller.tokens
    return KeyLevels(
        now_s,
        None if requests is None else requests.level(now_s),
        None if tokens is None else tokens.level(now_s),
    )
