"""Callers of the API: keys, origins of web pages, signatures of the fleet's entrance.

All three are checked before any other work for a request. The daemon sends the keys and
counts their use: for a key with limits the daemon must permit each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gpupoold.access import secret
from gpupoold.access.fleet import HEADER, Signature, verified
from gpupoold.domain import Priority
from gpupoold.frontend.client_answer import FACT_HEADERS
from gpupoold.frontend.daemon_calls import RateCalls
from gpupoold.frontend.errors import ApiError, bad_request, short, starting
from gpupoold.frontend.mounts import ModelScope as ModelScope
from gpupoold.frontend.request_context import RequestLocal
from gpupoold.wire.continuation import CONTINUES_HEADER, Continuation, OutputSoFar
from gpupoold.wire.messages import AccessReport, AccessRules, AddRequest, KeyRecord, ServedModel

_NO_KEY = (
    "You did not provide an API key. "
    "Send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`."
)
_WRONG_KEY = "The API key you provided is not valid."
_EXPIRED_KEY = "The API key you provided has expired."

_METHODS = ("DELETE", "GET", "HEAD", "POST")
_EXPOSED = ("retry-after", "x-request-id", *FACT_HEADERS)
_MAX_AGE_S = 600

ANY_ORIGIN = "*"

Headers = Iterable[tuple[bytes, bytes]]

MAX_TOKENS = 1 << 20
"""Limit of the tokens of a continued answer."""
_MAX_TOKEN_BYTES = 8
_BAD_SIGNATURE = (
    f"The header `{HEADER}` is not a valid signature: the daemon is in no fleet or in another one, "
    "or the clocks of the machines differ by more than a minute."
)

AnswerSoFar = dict[int, OutputSoFar]
"""The samples of a different daemon's answer by number, for one engine request each."""


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
        return "" if self.key is None else self.key.pace

    @property
    def key_id(self) -> str:
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
        ignored, because clients always send some text. Raises ApiError: 401 without a valid key;
        503 before the daemon has sent the keys.
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

        Raises ApiError: 429: too many requests or tokens in too short a time; 503: the rates are
        unknown now.
        """
        if caller.key is not None and caller.key.is_rate_limited:
            await self._rates.begin(caller.key)

    def asked(self, message: AddRequest) -> None:
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


class Cors:
    """An ASGI application around ``app``; ``callers`` may change at any time.

    The middleware is in front of the router: a preflight has no key, and an error before the
    model's API needs the headers too, or a page would see a network error instead of the message.
    """

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers
        self._origins: Collection[str] = ()
        self._middleware: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the preflight of an allowed origin; else pass the request on."""
        if self._callers.allowed_origins != self._origins:
            self._build(self._callers.allowed_origins)
        app = self._app if self._is_foreign_preflight(scope) else self._middleware
        await app(scope, receive, send)

    def _build(self, origins: Collection[str]) -> None:
        self._origins = origins
        self._middleware = self._app
        if origins:
            self._middleware = CORSMiddleware(
                self._app,
                allow_origins=origins,
                allow_methods=_METHODS,
                # Every header that the page asks for: clients send many of their own, and none
                # has an effect that a page must not have.
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=_EXPOSED,
                max_age=_MAX_AGE_S,
            )

    def _is_foreign_preflight(self, scope: Scope) -> bool:
        """Return whether the router should answer, whose refusal names the setting."""
        if scope["method"] != "OPTIONS":
            return False
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        return not all(is_allowed(origin.decode("latin-1"), self._callers) for origin in origins)


def check_host(headers: Headers, callers: Callers) -> None:
    """Check that a request was meant for this server.

    A page of another site can make a visitor's browser send requests to a loopback address:
    directly, with the page's ``Origin``, or as the page's own site after its name has been pointed
    at 127.0.0.1 (DNS rebinding), with that name as ``Host``. Neither can send an unknown key.

    ``Host`` must be a loopback address, ``localhost`` or one of ``host_names`` (lower case). A
    request without ``Host`` (HTTP/1.0) does not come from a browser.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"host" and not _is_ours(f"//{text}", callers.host_names):
            raise ApiError(
                421,
                f"The Host header is {short(text)!r}, which this server does not answer without an "
                "API key. Use localhost or 127.0.0.1, or name the host in access.host_names.",
            )


def check_origin(headers: Headers, callers: Callers) -> None:
    """Check that a request was not sent by another site's page.

    The host of ``Origin``, if present, must be as for :func:`check_host`, or the origin one of
    ``allowed_origins``. Origins of schemes other than HTTP belong to desktop programs and are
    accepted.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name != b"origin" or not _is_of_a_page(text) or is_allowed(text, callers):
            continue
        if not _is_ours(text, callers.host_names):
            raise ApiError(
                403,
                f"The Origin header is {short(text)!r}: pages of other sites have no access "
                "without an API key. To give the pages of an origin access, add it to "
                "access.allowed_origins.",
            )


def is_allowed(origin: str, callers: Callers) -> bool:
    return origin in callers.allowed_origins or ANY_ORIGIN in callers.allowed_origins


def _is_of_a_page(origin: str) -> bool:
    """Return whether a page can have this origin; ``null`` belongs to a sandboxed page."""
    scheme, found, _ = origin.partition("://")
    return not found or scheme.lower() in ("http", "https")


def _is_ours(url: str, host_names: Collection[str]) -> bool:
    try:
        host = (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost") or host in host_names:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class FleetCall:
    """One signed request; ``body`` must be opened before any other use.

    The stream of a signed request has comments with the answer's token ids. After the death of a
    daemon the entrance sends the client's request and these tokens to a different daemon, which
    passes the tokens through the API's text processing again and continues after the tokens; the
    entrance drops the text that the client has.
    """

    def __init__(self, signature: Signature, *, continues: bool) -> None:
        self._signature = signature
        self._continues = continues

    @property
    def max_further_bytes(self) -> int:
        """The most bytes of the body beside the client's."""
        return MAX_TOKENS * _MAX_TOKEN_BYTES if self._continues else 0

    def opened(self, body: bytes) -> tuple[bytes, AnswerSoFar | None]:
        """Return the client's body, and the answer to be continued, if any.

        Raises ApiError: 401, the body is not the signed body; 400, the body is no continuation.
        """
        if not self._signature.covers(body):
            raise ApiError(401, _BAD_SIGNATURE)
        if not self._continues:
            return body, None
        try:
            found = msgspec.json.decode(body, type=Continuation)
        except msgspec.MsgspecError as error:
            raise bad_request(f"The continuation cannot be read: {error}") from error
        if not 0 < sum(len(output.token_ids) for output in found.outputs) <= MAX_TOKENS:
            raise bad_request(f"A continuation has 1 to {MAX_TOKENS:,} tokens.")
        return bytes(found.request), {
            n: output for n, output in enumerate(found.outputs) if output.token_ids
        }


class FleetCalls:
    """Recognises signed requests; ``secret`` and ``downloads`` come from the daemon.

    ``downloads`` is the folder of the checkpoints for other nodes, empty before.
    """

    def __init__(self) -> None:
        self.secret = ""
        self.downloads = ""

    def find(self, scope: Scope) -> FleetCall | None:
        """Return the call of a signed request, None for other requests.

        Raises ApiError: 401, the signature is wrong.
        """
        headers = {name: value for name, value in scope["headers"] if name in _NAMES}
        value = headers.get(HEADER.encode())
        if value is None:
            return None
        text = value.decode("latin-1")
        signature = verified(self.secret, scope["method"], scope["path"], text)
        if signature is None:
            raise ApiError(401, _BAD_SIGNATURE)
        return FleetCall(signature, continues=CONTINUES_HEADER.encode() in headers)


_NAMES = frozenset((HEADER.encode(), CONTINUES_HEADER.encode()))


def why_impossible(so_far: OutputSoFar, max_tokens: int, vocab_size: int) -> str:
    """Return the reason against the continuation of a sample, empty without one.

    ``max_tokens`` is the request's limit.
    """
    num_tokens, is_over = len(so_far.token_ids), so_far.finish_reason is not None
    if num_tokens > max_tokens or (num_tokens == max_tokens and not is_over):
        return f"{num_tokens} tokens of an answer of at most {max_tokens} leave none to make"
    if not all(0 <= token_id < vocab_size for token_id in so_far.token_ids):
        return f"token ids are not below the vocabulary's size of {vocab_size}"
    return ""


continued: RequestLocal[AnswerSoFar] = RequestLocal("answer_so_far")


def take_output_so_far(number: int) -> OutputSoFar | None:
    """Return the sample of this number to be continued, None for a new sample or the next time."""
    answer = continued.get()
    return None if answer is None else answer.pop(number, None)
