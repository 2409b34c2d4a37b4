"""A stream from a node to the client, to be continued by a different node.

Comments of the node have the ids of the answer's tokens. A continuation repeats the events of these
tokens; the relay drops what the client has. The text of a token reaches the client after the
comment, never before, so no text is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict

import msgspec

from gpupoold.wire.continuation import TOKENS_COMMENT, Continuation, OutputSoFar

MAX_EVENT_BYTES = 16 << 20
MAX_OUTPUTS = 1 << 10
MAX_TOKENS = 1 << 21
"""Limit of the tokens of a stream that are kept, of all samples."""
DATA = b"data: "
_TOKENS = f": {TOKENS_COMMENT} ".encode()


class Relay(ABC):
    """One stream of events; ``feed`` takes a node's bytes and returns the client's.

    A subclass for each form of events knows what the client has.
    """

    def __init__(self) -> None:
        self.is_complete = False
        """True when the client has the end of the stream."""
        self.lost = b""
        """The node's last event if the node gave the answer up, else empty; held back."""
        self._is_continued = False
        self._outputs: defaultdict[int, OutputSoFar] = defaultdict(OutputSoFar)
        self._num_tokens = 0
        self._rest = bytearray()

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """True if the client has a part of the answer."""

    @property
    def can_continue(self) -> bool:
        """False if the answer so far has parts that a continuation could not repeat."""
        return True

    @abstractmethod
    def ending(self, text: str) -> bytes:
        """Return the events that tell the client of an error of code 503."""

    @abstractmethod
    def _passed(self, event: bytes) -> bytes:
        """Return the bytes of an event for the client, empty for what the client has.

        Raises:
            ValueError: the event has another form.
        """

    def _num_kept(self, _: int) -> int | None:
        """Return the number of tokens of a sample to continue after, None for all tokens."""
        return None

    def outputs(self) -> list[OutputSoFar]:
        """Return the samples to continue, without samples at the end that have no tokens."""
        found = [self._kept(number) for number in range(max(self._outputs, default=-1) + 1)]
        while found and not found[-1].token_ids:
            found.pop()
        return found

    def continuation(self, request: bytes) -> bytes:
        """Return the body of the request to continue after the tokens so far."""
        return msgspec.json.encode(Continuation(msgspec.Raw(request), self.outputs()))

    def begin_again(self) -> None:
        """Expect bytes of a different node, from the beginning of the answer."""
        self._rest, self.lost = bytearray(), b""
        self._outputs = defaultdict(OutputSoFar, enumerate(self.outputs()))
        self._is_continued = self.has_begun

    def feed(self, received: bytes) -> bytes:
        """Return the bytes for the client.

        Raises:
            ValueError: an event is too long, or has another form than the protocol's.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += received
        events: list[bytes] = []
        if self._rest.find(b"\n\n", searched) >= 0:
            *events, rest = bytes(self._rest).split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of a node has more than {MAX_EVENT_BYTES:,} bytes")
        return b"".join(map(self._told, events))

    def _told(self, event: bytes) -> bytes:
        if event.startswith(_TOKENS):
            self._note_tokens(event[len(_TOKENS) :].decode())
            return b""
        return event + b"\n\n" if event.startswith(b":") else self._passed(event)

    def _note_tokens(self, comment: str) -> None:
        number, ids, *reason = comment.split(" ")
        if not 0 <= int(number) < MAX_OUTPUTS:
            raise ValueError(f"a node tells tokens of sample {number}")
        output = self._outputs[int(number)]
        token_ids = [int(one) for one in ids.split(",")]
        self._num_tokens += len(token_ids)
        if self._num_tokens > MAX_TOKENS:
            raise ValueError(f"a node tells more than {MAX_TOKENS:,} tokens")
        output.token_ids += token_ids
        output.finish_reason = (reason and reason[0]) or None

    def _kept(self, number: int) -> OutputSoFar:
        output = self._outputs.get(number) or OutputSoFar()
        num_kept = self._num_kept(number)
        if num_kept is None or num_kept >= len(output.token_ids):
            return output
        return OutputSoFar(output.token_ids[:num_kept])
