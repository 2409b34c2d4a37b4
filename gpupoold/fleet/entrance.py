"""The entrance of a fleet: one HTTP API for the models of all nodes, as an ASGI application.

A request goes to the node with the earliest expected first token, and after a refusal or a lost
connection to the next node. After the death of a node the streams continue on other nodes, after
the tokens that the clients have. The entrance probes the nodes, because the cluster notices a dead
node only after ten seconds and more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from gpupoold.access import secret
from gpupoold.access.fleet import HEADER, sign
from gpupoold.domain import Priority
from gpupoold.fleet import asgi
from gpupoold.fleet.cluster import FleetTable, Node
from gpupoold.fleet.relays import ChoicesRelay, Relay, TypedRelay
from gpupoold.fleet.routing import CHOICES_PATHS, RESPONSES, RoutedBody, conversation_of, order
from gpupoold.wire.continuation import CONTINUES_HEADER

_logger = logging.getLogger(__name__)

ROUTED_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/pooling",
        "/classify",
        "/tokenize",
        "/detokenize",
    }
)
MAX_HELD_BYTES = 1 << 30
"""Limit of the bodies that one entrance process holds at once."""
# Further nodes that are tried for one request.
_ATTEMPTS = 8
# Time to wait for a node with the model. A lost node has tens of models, which other nodes load in
# turn.
_PATIENCE_S = 120.0
_LOOK_AGAIN_S = 0.2
_CONNECT_TIMEOUT_S = 2.0
_LIST_TIMEOUT_S = 10.0
# Statuses after which the next node is tried.
_TRIES_NEXT = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.BAD_GATEWAY)
_NO_MODEL = b"model_not_found"
_FAULTS = (aiohttp.ClientError, ConnectionError, TimeoutError)
# An answer, or an event, of another form than the protocol's, or a cut one.
_OTHER_FORM = (ValueError, TypeError, LookupError, RecursionError, msgspec.MsgspecError)

_EVERY_S = 0.5
_TIMEOUT_S = 1.5
# Failed probes in a row of a dead node; after a refused connection a node is dead at once.
_LIMIT = 2


class _Models(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[dict[str, Any]]


class NodeFailed(Exception):
    """A node refused a request, or died before the beginning of the answer."""

    def __init__(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = list(headers)


@dataclass(slots=True)
class Asked:
    """A client's request in the fleet."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str
    wanted: RoutedBody
    priority: Priority
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    relay: Relay = field(init=False)
    has_begun: bool = False
    """True if the client has the headers of the answer."""
    avoided: set[str] = field(default_factory=set)
    refusal: NodeFailed | None = None
    can_continue: bool = field(init=False)

    def __post_init__(self) -> None:
        """Decide once, because each part of a stream asks."""
        self.can_continue = self.wanted.can_continue(self.path)
        self.relay = make_relay(self.path, self.wanted)


class Entrance:
    """An entrance, an ASGI application."""

    def __init__(self) -> None:
        self.table = FleetTable(version=-1)
        self._sent: Counter[tuple[str, str]] = Counter()
        self._version = -1
        self._names: dict[str, str] = {}
        self._num_held = 0
        self._session: aiohttp.ClientSession | None = None
        self._liveness: Liveness | None = None

    def replace(self, table: FleetTable) -> None:
        if table.version != self._version:
            self._version = table.version
            self._sent.clear()
            self._names = table.names()
        self.table = table
        if self._liveness is not None:
            self._liveness.watch({node.name: node.url for node in table.nodes if not node.is_lost})

    async def start(self) -> None:
        """Open the connections; to be called once, on the serving event loop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        self._liveness = Liveness(self._session)
        self.replace(self.table)

    async def close(self) -> None:
        if self._liveness is not None:
            await self._liveness.close()
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        try:
            if path in ROUTED_PATHS and method == "POST":
                with self._holding() as hold:
                    body = await asgi.read_body(receive, send, hold)
                    if body is not None:
                        await self._route(scope, receive, send, body)
            elif path == "/v1/models" and method in ("GET", "HEAD"):
                await self._list_models(scope, send)
            elif path in ("/health", "/ready") and method in ("GET", "HEAD"):
                is_ready = any(node.takes_requests for node in self._alive())
                status = 200 if is_ready or path == "/health" else 503
                await asgi.send_json(send, status, {"ready": is_ready}, with_body=method == "GET")
            else:
                text = f"The fleet's entrance does not serve {method} {path}; ask a node itself."
                await asgi.send_error(send, 404, text)
        except asgi.ClientGone:
            pass

    def _alive(self) -> list[Node]:
        dead = self._dead()
        return [node for node in self.table.nodes if not node.is_lost and node.name not in dead]

    def _dead(self) -> frozenset[str]:
        return frozenset() if self._liveness is None else self._liveness.dead

    async def _list_models(self, scope: asgi.Scope, send: asgi.Send) -> None:
        """Answer with the models of all nodes, as far as the caller may use the models."""
        headers = asgi.passed_on(scope["headers"])
        answers = await asyncio.gather(*(self._models(node, headers) for node in self._alive()))
        refused = [answer for answer in answers if isinstance(answer, NodeFailed)]
        found: dict[str, Any] = {}
        for models in answers:
            if not isinstance(models, NodeFailed):
                found = models | found
        if refused and len(refused) == len(answers):
            await asgi.send_whole(send, refused[0].status, refused[0].headers, refused[0].body)
        else:
            rows = [found[name] for name in sorted(found)]
            answer = {"object": "list", "data": rows}
            await asgi.send_json(send, 200, answer, with_body=scope["method"] == "GET")

    async def _models(
        self, node: Node, headers: Iterable[tuple[bytes, bytes]]
    ) -> dict[str, Any] | NodeFailed:
        """Return a node's models by name."""
        assert self._session is not None
        asking = self._session.get(
            f"{node.url}/v1/models",
            headers=asgi.as_text(headers),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S),
        )
        try:
            async with asking as answer:
                body = await asgi.read_answer(answer)
                if answer.status != HTTPStatus.OK:
                    return NodeFailed(answer.status, body, asgi.headers_of(answer))
            rows = msgspec.json.decode(body, type=_Models).data
            if not all(isinstance(row["id"], str) for row in rows):
                raise ValueError("a model without a name")
            return {row["id"]: row for row in rows}
        except (*_FAULTS, *_OTHER_FORM) as error:
            text = f"{node.name} does not answer: {error or type(error).__name__}"
            return NodeFailed(503, asgi.error_body(503, text), ())

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], bool]]:
        """Yield a function to hold further bytes in the context; False means too many."""
        num_held = 0

        def hold(num_bytes: int) -> bool:
            nonlocal num_held
            if self._num_held + num_bytes > MAX_HELD_BYTES:
                return False
            num_held += num_bytes
            self._num_held += num_bytes
            return True

        try:
            yield hold
        finally:
            self._num_held -= num_held

    async def _route(
        self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send, body: bytes
    ) -> None:
        try:
            wanted = msgspec.json.decode(body, type=RoutedBody)
        except msgspec.MsgspecError as error:
            await asgi.send_error(send, 400, f"The body cannot be read: {error}")
            return
        model = self._names.get(wanted.model)
        if model is None and self._version < 0:
            text = "The entrance is starting."
            await asgi.send_error(send, 503, text, [(b"retry-after", b"1")])
            return
        if model is None:
            await asgi.send_error(send, 404, f"The fleet has no model {wanted.model[:128]!r}.")
            return
        query = scope.get("query_string", b"").decode("latin-1")
        headers = asgi.passed_on(scope["headers"])
        priority = self._priority_of(headers)
        asked = Asked(scope["method"], scope["path"], query, headers, body, model, wanted, priority)
        async with asgi.until_gone(receive) as gone:
            await self._serve(asked, send, gone)

    def _priority_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Priority:
        """Return the priority of a request's key, which the nodes check."""
        known = self.table.priorities
        ids = (secret.id_of(text) or "" for text in secret.sent_in(headers)) if known else ()
        return next((known[key_id] for key_id in ids if key_id in known), Priority.NORMAL)

    async def _serve(self, asked: Asked, send: asgi.Send, gone: asyncio.Event) -> None:
        """Try node after node until the client has the whole answer."""
        conversation = conversation_of(asked.model, asked.wanted)
        give_up_s = time.monotonic() + _PATIENCE_S
        num_attempts = 0
        while num_attempts < _ATTEMPTS and not gone.is_set():
            avoided = asked.avoided | self._dead()
            sent = {node: num for (node, name), num in self._sent.items() if name == asked.model}
            nodes = order(self.table, asked.model, conversation, sent, avoided, asked.priority)
            if not nodes:
                if asked.refusal is not None and asked.refusal.status != 502:
                    break
                if time.monotonic() > give_up_s:
                    break
                asked.avoided.clear()
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            node = nodes[0]
            num_attempts += 1
            self._sent[node.name, asked.model] += 1
            try:
                if await self._attempt(asked, node, send):
                    return
                if asked.has_begun and not (asked.can_continue and asked.relay.can_continue):
                    break
                give_up_s = time.monotonic() + _PATIENCE_S
            except NodeFailed as error:
                asked.refusal = error
            asked.avoided.add(node.name)
        if not gone.is_set():
            await self._give_up(asked, send)

    async def _attempt(self, asked: Asked, node: Node, send: asgi.Send) -> bool:
        """Ask one node; return whether the client has the whole answer.

        Raises NodeFailed: the node did not begin to answer.
        """
        assert self._session is not None
        assert self._liveness is not None
        relay, body = asked.relay, asked.body
        headers = list(asked.headers)
        if not any(name.lower() == b"x-request-id" for name, _ in headers):
            # Equal ids on all nodes: the id of an answer is made of the request's.
            headers.append((b"x-request-id", asked.id.encode()))
        if relay.has_begun and relay.outputs():
            body = relay.continuation(asked.body)
            headers.append((CONTINUES_HEADER.encode(), b"1"))
        relay.begin_again()
        if asked.can_continue:  # the node tells the tokens of signed requests
            signature = sign(self.table.secret, asked.method, asked.path, body)
            headers.append((HEADER.encode(), signature.encode()))
        url = f"{node.url}{asked.path}{'?' if asked.query else ''}{asked.query}"
        try:
            # A node's word is no reason to send a prompt and a key elsewhere.
            asking = self._session.request(
                asked.method, url, data=body, headers=asgi.as_text(headers), allow_redirects=False
            )
            async with asking as answer:
                with self._liveness.reading(node.name, answer):
                    return await self._take(asked, node, answer, send)
        except (*_FAULTS, *_OTHER_FORM) as error:
            self._liveness.suspect(node.name)
            _logger.info("%s: %s on %s", asked.id, error or type(error).__name__, node.name)
            if asked.has_begun:
                return False
            text = f"The node {node.name} does not answer."
            raise NodeFailed(502, asgi.error_body(502, text), ()) from error

    async def _take(
        self, asked: Asked, node: Node, answer: aiohttp.ClientResponse, send: asgi.Send
    ) -> bool:
        """Pass a node's answer on; return whether the client has all of it.

        Raises:
            NodeFailed: the node has refused the request.
            aiohttp.ClientError: the node has died.
        """
        if HTTPStatus.MULTIPLE_CHOICES <= answer.status < HTTPStatus.BAD_REQUEST:
            raise ValueError("a redirection")
        if answer.status in _TRIES_NEXT and not asked.has_begun:
            raise NodeFailed(answer.status, await asgi.read_answer(answer), asgi.headers_of(answer))
        is_stream = answer.content_type == "text/event-stream"
        if not is_stream and not asked.has_begun:
            whole = await asgi.read_answer(answer)
            if answer.status == HTTPStatus.NOT_FOUND and _NO_MODEL in whole:
                # The fleet has moved the model since the table.
                text = f"The node {node.name} has {asked.model} no more."
                raise NodeFailed(502, asgi.error_body(502, text), ())
            await asgi.send_whole(send, answer.status, asgi.headers_of(answer), whole, node.name)
            return True
        return is_stream and await self._pass_on(asked, node, answer, send)

    async def _pass_on(
        self, asked: Asked, node: Node, answer: aiohttp.ClientResponse, send: asgi.Send
    ) -> bool:
        """Pass a stream on; return whether it is complete.

        Raises aiohttp.ClientError: the node has died.
        """
        relay = asked.relay
        async for received in answer.content.iter_any():
            passed = relay.feed(received) if asked.can_continue else received
            if relay.lost:
                return False
            if not asked.has_begun:
                await asgi.send_start(send, answer.status, asgi.headers_of(answer), node.name)
                asked.has_begun = True
            if passed:
                await asgi.send_body(send, passed, more=True)
        if asked.can_continue and not relay.is_complete:
            return False
        await asgi.send_body(send, b"", more=False)
        return True

    async def _give_up(self, asked: Asked, send: asgi.Send) -> None:
        """Tell the client that no node answers or continues."""
        if asked.has_begun:
            text = "The node that answered has died, and no other node could continue."
            await asgi.send_body(send, asked.relay.ending(text), more=False)
        elif asked.refusal is not None:
            refusal = asked.refusal
            status = 503 if refusal.status == HTTPStatus.BAD_GATEWAY else refusal.status
            await asgi.send_whole(send, status, refusal.headers, refusal.body)
        else:
            text = f"No node serves {asked.model} now."
            await asgi.send_error(send, 503, text, [(b"retry-after", b"5")])


def make_relay(path: str, wanted: RoutedBody) -> Relay:
    """Return the relay for the events of a path's answers."""
    if path in CHOICES_PATHS:
        return ChoicesRelay(has_logprobs=wanted.wants_logprobs)
    return TypedRelay(is_responses=path == RESPONSES)


class Liveness:
    """Probes nodes and breaks the answers of dead nodes; for the event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._urls: dict[str, str] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._num_failed: dict[str, int] = {}
        self._answers: defaultdict[str, set[aiohttp.ClientResponse]] = defaultdict(set)

    @property
    def dead(self) -> frozenset[str]:
        """The nodes that do not answer now."""
        return frozenset(name for name, num in self._num_failed.items() if num >= _LIMIT)

    def watch(self, urls: Mapping[str, str]) -> None:
        """Probe these nodes from now on instead of earlier nodes."""
        for name in self._urls.keys() - urls.keys():
            self._probes.pop(name).cancel()
            self._num_failed.pop(name, None)
        self._urls = dict(urls)
        for name in urls.keys() - self._probes.keys():
            self._probes[name] = asyncio.create_task(self._probe(name), name=f"probe {name}")

    def suspect(self, name: str) -> None:
        """Note a failed request to a node; the next probe decides."""
        if name in self._urls:
            self._num_failed[name] = max(self._num_failed.get(name, 0), _LIMIT - 1)

    @contextlib.contextmanager
    def reading(self, name: str, answer: aiohttp.ClientResponse) -> Iterator[None]:
        """Close the connection of an answer if the node dies in the context.

        A machine without power closes no connection.
        """
        self._answers[name].add(answer)
        try:
            yield
        finally:
            self._answers[name].discard(answer)

    async def close(self) -> None:
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    async def _probe(self, name: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        while True:
            try:
                asking = self._session.get(
                    f"{self._urls[name]}/health", timeout=timeout, allow_redirects=False
                )
                async with asking as answer:
                    await answer.content.readany()
                self._num_failed[name] = 0
            except aiohttp.ClientConnectorError:
                self._failed(name, _LIMIT)
            except (aiohttp.ClientError, TimeoutError):
                self._failed(name, self._num_failed.get(name, 0) + 1)
            await asyncio.sleep(_EVERY_S)

    def _failed(self, name: str, num: int) -> None:
        self._num_failed[name] = num
        if num >= _LIMIT:
            for answer in self._answers[name]:
                answer.close()
