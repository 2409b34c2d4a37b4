"""The node for a request, by first token and conversation, and the use of keys with rates."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from gpupoold.access.rates import RateUse
from gpupoold.domain import Priority
from gpupoold.fleet.cluster import FleetTable, Node

# A node with the conversation's KV may be later by this share of the TTFT target.
_CONVERSATION_SHARE = 0.25
# Requests of low priority leave the earliest nodes to other requests, as long as the first token is
# expected within this share of the TTFT target.
_LOW_SHARE = 0.5
# Assumed wait on a node without an estimate, while the model is brought to host memory.
_UNKNOWN_S = 30.0
# Messages that distinguish conversations; many conversations share a system prompt.
_FIRST_MESSAGES = 2
_FIRST_BYTES = 512


_messages = msgspec.json.Decoder(list[msgspec.Raw])

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# Their answers have chunks with choices.
CHOICES_PATHS = frozenset({CHAT, COMPLETIONS})

_NONE = RateUse()


def conversation_of(model: str, wanted: RoutedBody) -> bytes:
    """Return a digest, equal for all turns of a conversation."""
    try:
        messages = _messages.decode(wanted.messages)
    except msgspec.MsgspecError:  # the node tells the client
        return b""
    first = [bytes(message) for message in messages[:_FIRST_MESSAGES]]
    first += [bytes(text)[:_FIRST_BYTES] for text in (wanted.prompt, wanted.input)]
    return hashlib.blake2b(b"\0".join([model.encode(), *first]), digest_size=16).digest()


def order(
    table: FleetTable,
    model: str,
    conversation: bytes,
    sent: Mapping[str, int],
    avoided: Collection[str] = (),
    priority: Priority = Priority.NORMAL,
) -> list[Node]:
    """Return the nodes able to answer a request of a model, the best first.

    ``sent`` has the number of requests of the model sent to each node since the latest report.
    Nodes in ``avoided`` are left out, and nodes where the model retires if others are able.
    """
    able = [
        node
        for node in table.nodes
        if node.takes_requests and node.name not in avoided and node.serves(model)
    ]
    able = [node for node in able if model not in node.retiring] or able
    waits_s = {node.name: _wait_s(node, model, sent.get(node.name, 0)) for node in able}
    able.sort(key=lambda node: (waits_s[node.name], node.name))
    ttft_s = min((one.ttft_s for node in able if (one := node.model(model))), default=0.0)
    first = None
    if priority is Priority.LOW:
        early = [node for node in able if waits_s[node.name] <= _LOW_SHARE * ttft_s]
        first = early[-1] if early else None
    if conversation and able:
        home = max(able, key=lambda node: _rank(node, conversation))
        best = first or able[0]
        if waits_s[home.name] <= waits_s[best.name] + _CONVERSATION_SHARE * ttft_s:
            first = home
    return able if first is None else [first, *(node for node in able if node is not first)]


def _wait_s(node: Node, model: str, num_sent: int) -> float:
    """Return the seconds to a first token of a request at a node.

    Requests missing in the report are assumed to wait like the requests in the report.
    """
    found = node.model(model)
    if found is None or found.first_token_in_s is None:
        return _UNKNOWN_S + num_sent
    return found.first_token_in_s * (1 + num_sent / (found.num_live + 1))


def _rank(node: Node, conversation: bytes) -> bytes:
    """Return the rank of a node for a conversation (rendezvous hashing)."""
    return hashlib.blake2b(node.name.encode(), key=conversation, digest_size=8).digest()


class _Tool(msgspec.Struct):
    type: str = ""


_tools = msgspec.json.Decoder(list[_Tool] | None)


class RoutedBody(msgspec.Struct):
    """The fields of a client's request for routing and continuation."""

    model: str = ""
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None
    background: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    input: msgspec.Raw = msgspec.Raw(b"null")
    include: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    def can_continue(self, path: str) -> bool:
        """Return whether a different node could continue the answer after the first events."""
        if not self.stream:
            return False
        if path == RESPONSES:
            return (
                not self.background
                and b"logprobs" not in bytes(self.include)
                and self._has_only_functions()
            )
        return path == MESSAGES or (path in CHOICES_PATHS and self._choices_can_continue())

    def _choices_can_continue(self) -> bool:
        prompt = bytes(self.prompt).lstrip()
        is_one = not prompt.startswith(b"[") or prompt[1:].lstrip()[:1].isdigit()
        return is_one and not self.echo and self.best_of in (None, 1)

    def _has_only_functions(self) -> bool:
        """Return whether only the client calls tools; the node's calls cannot be repeated."""
        try:
            tools = _tools.decode(self.tools)
        except msgspec.MsgspecError:  # the node tells the client
            return False
        return all(tool.type == "function" for tool in tools or ())


class RateSums:
    """The use of all keys on all nodes since the start of the controller.

    Each daemon counts the use of keys with rates since its start. The controller adds the counts,
    and returns to each node the use on the other nodes; the node's agent charges the growth to the
    buckets of the daemon. All messages have sums, so that a lost message is made good by the next.
    """

    def __init__(self) -> None:
        self._counted: dict[str, Mapping[str, RateUse]] = {}
        self._grown: dict[str, dict[str, RateUse]] = {}
        self._total: dict[str, RateUse] = {}

    def counted(self, node: str, uses: Mapping[str, RateUse]) -> None:
        """Add the growth of a node's counts; the first counts of a node are where growth begins."""
        before = self._counted.get(node)
        self._counted[node] = dict(uses)
        if before is None:
            return
        sums = self._grown.setdefault(node, {})
        for key_id, use in uses.items():
            growth = _growth(use, before.get(key_id, _NONE))
            if growth != _NONE:
                sums[key_id] = sums.get(key_id, _NONE) + growth
                self._total[key_id] = self._total.get(key_id, _NONE) + growth

    def elsewhere(self, node: str) -> dict[str, RateUse]:
        own = self._grown.get(node, {})
        rest = {key_id: use - own.get(key_id, _NONE) for key_id, use in self._total.items()}
        return {key_id: use for key_id, use in rest.items() if use != _NONE}


class RateGrowth:
    """The growth of the use elsewhere, on one node."""

    def __init__(self) -> None:
        self._epoch = -1
        self._known: dict[str, RateUse] = {}

    def due(self, epoch: int, elsewhere: Mapping[str, RateUse]) -> dict[str, RateUse]:
        """Return the use to charge now; nothing for the first sums of a controller's epoch.

        Sums that arrive late are smaller than known sums and are ignored.
        """
        is_first, self._epoch = epoch != self._epoch, epoch
        if is_first:
            self._known = dict(elsewhere)
            return {}
        due = {}
        for key_id, use in elsewhere.items():
            known = self._known.get(key_id, _NONE)
            latest = RateUse(*map(max, use, known))
            self._known[key_id] = latest
            if latest != known:
                due[key_id] = latest - known
        return due


def _growth(use: RateUse, before: RateUse) -> RateUse:
    """Return the growth of counts; smaller counts than before are those of a new daemon."""
    has_restarted = use.num_requests < before.num_requests or use.num_tokens < before.num_tokens
    return use if has_restarted else use - before
