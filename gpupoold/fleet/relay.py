"""A stream from a node to the client, to be continued by a different node.

Comments of the node have the ids of the answer's tokens. A continuation repeats the events of these
tokens; the relay drops what the client has. The text of a token reaches the client after the
comment, never before, so no text is missing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import msgspec

from gpupoold.fleet.choices import Choices
from gpupoold.fleet.typed_events import TypedEvents
from gpupoold.fleet.wanted import CHOICES_PATHS, Wanted
from gpupoold.wire.continuation import TOKENS_COMMENT, Continuation, OutputSoFar

MAX_EVENT_BYTES = 16 << 20
MAX_OUTPUTS = 1 << 10
_TOKENS = f": {TOKENS_COMMENT} ".encode()


class Events(Protocol):
    """The events of one protocol, which knows what the client has."""

    is_complete: bool
    """True when the client has the end of the stream."""
    lost: bytes
    """The node's last event if the node gave the answer up, else empty; held back."""

    @property
    def has_begun(self) -> bool:
        """True if the client has a part of the answer."""
        ...

    @property
    def can_continue(self) -> bool:
        """False if the answer so far has parts that a continuation could not repeat."""
        ...

    def begin_again(self) -> None:
        """Expect the events of a different node, from the beginning of the answer."""

    def passed(self, event: bytes) -> bytes:
        """Return the bytes of an event for the client, empty for what the client has.

        Raises:
            ValueError: the event has another form than the protocol's.
        """
        ...

    def num_kept(self, number: int, /) -> int | None:
        """Return the number of tokens of a sample to continue after, None for all tokens."""
        ...

    def ending(self, text: str) -> bytes:
        """Return the events that tell the client of an error of code 503."""
        ...


class Relay:
    """One stream of events; ``feed`` takes a node's bytes and returns the client's."""

    def __init__(self, path: str, wanted: Wanted) -> None:
        self._events: Events = (
            Choices(has_logprobs=wanted.wants_logprobs) if path in CHOICES_PATHS else TypedEvents()
        )
        self._outputs: defaultdict[int, OutputSoFar] = defaultdict(OutputSoFar)
        self._rest = b""

    @property
    def has_begun(self) -> bool:
        """True if the client has a part of the answer."""
        return self._events.has_begun

    @property
    def is_complete(self) -> bool:
        """True when the client has the end of the stream."""
        return self._events.is_complete

    @property
    def can_continue(self) -> bool:
        """False if the answer so far has parts that a continuation could not repeat."""
        return self._events.can_continue

    @property
    def lost(self) -> bytes:
        """The node's last event if the node gave the answer up, else empty; held back."""
        return self._events.lost

    def outputs(self) -> list[OutputSoFar]:
        """Return the samples to continue, without samples at the end that have no tokens."""
        found = [self._kept(number) for number in range(max(self._outputs, default=-1) + 1)]
        while found and not found[-1].token_ids:
            found.pop()
        return found

    def continuation(self, request: bytes) -> bytes:
        """Return the body of the request to continue after the tokens so far."""
        return msgspec.json.encode(Continuation(msgspec.Raw(request), self.outputs()))

    def ending(self, text: str) -> bytes:
        """Return the events that tell the client of an error of code 503."""
        return self._events.ending(text)

    def begin_again(self) -> None:
        """Expect bytes of a different node, from the beginning of the answer."""
        self._rest = b""
        self._outputs = defaultdict(OutputSoFar, enumerate(self.outputs()))
        self._events.begin_again()

    def feed(self, received: bytes) -> bytes:
        """Return the bytes for the client.

        Raises:
            ValueError: an event is too long, or has another form than the protocol's.
        """
        *events, self._rest = (self._rest + received).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of a node has more than {MAX_EVENT_BYTES:,} bytes")
        return b"".join(self._passed(event) for event in events)

    def _passed(self, event: bytes) -> bytes:
        if not event.startswith(b":"):
            return self._events.passed(event)
        if not event.startswith(_TOKENS):
            return event + b"\n\n"
        number, ids, *reason = event[len(_TOKENS) :].decode().split(" ")
        if not 0 <= int(number) < MAX_OUTPUTS:
            raise ValueError(f"a node tells tokens of sample {number}")
        output = self._outputs[int(number)]
        output.token_ids += map(int, ids.split(","))
        output.finish_reason = (reason and reason[0]) or None
        return b""

    def _kept(self, number: int) -> OutputSoFar:
        output = self._outputs.get(number) or OutputSoFar()
        num_kept = self._events.num_kept(number)
        if num_kept is None or num_kept >= len(output.token_ids):
            return output
        return OutputSoFar(output.token_ids[:num_kept])
