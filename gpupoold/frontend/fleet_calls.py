"""Requests of the fleet's entrance, which may continue the answer of a different daemon.

The stream of a signed request has comments with the answer's token ids. After the death of a daemon
the entrance sends the client's request and these tokens to a different daemon, which passes the
tokens through the API's text processing again and continues after the tokens; the entrance drops
the text that the client has.
"""

from __future__ import annotations

import msgspec

from gpupoold.access.fleet import HEADER, Signature, verified
from gpupoold.frontend.errors import ApiError, bad_request
from gpupoold.frontend.mounts import Scope
from gpupoold.frontend.request_bounds import RequestLocal
from gpupoold.wire.continuation import CONTINUES_HEADER, Continuation, OutputSoFar

MAX_TOKENS = 1 << 20
"""Limit of the tokens of a continued answer."""
_MAX_TOKEN_BYTES = 8
_BAD_SIGNATURE = (
    f"The header `{HEADER}` is not a valid signature: the daemon is in no fleet or in another one, "
    "or the clocks of the machines differ by more than a minute."
)

AnswerSoFar = dict[int, OutputSoFar]
"""The samples of a different daemon's answer by number, for one engine request each."""


class FleetCall:
    """One signed request; ``body`` must be opened before any other use."""

    def __init__(self, signature: Signature, *, continues: bool) -> None:
        self._signature = signature
        self._continues = continues

    @property
    def max_further_bytes(self) -> int:
        """The most bytes of the body beside the client's."""
        return MAX_TOKENS * _MAX_TOKEN_BYTES if self._continues else 0

    def opened(self, body: bytes) -> tuple[bytes, AnswerSoFar | None]:
        """Return the client's body, and the answer to be continued, if any.

        Raises:
            ApiError: 401, the body is not the signed body; 400, the body is no continuation.
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
            n: one for n, one in enumerate(found.outputs) if one.token_ids
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

        Raises:
            ApiError: 401, the signature is wrong.
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
    if not all(0 <= one < vocab_size for one in so_far.token_ids):
        return f"token ids are not below the vocabulary's size of {vocab_size}"
    return ""


continued: RequestLocal[AnswerSoFar] = RequestLocal("answer_so_far")


def take_output_so_far(number: int) -> OutputSoFar | None:
    """Return the sample of this number to be continued, None for a new sample or the next time."""
    answer = continued.get()
    return None if answer is None else answer.pop(number, None)
