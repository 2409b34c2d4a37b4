"""What a fleet's entrance and a frontend tell each other over HTTP about answers that continue."""

from __future__ import annotations

import msgspec

CONTINUES_HEADER = "x-gpupool-continues"
"""Header of a signed request whose body is a :class:`Continuation`."""

TOKENS_COMMENT = "gpupool-tokens"
"""First word of a comment with tokens of an answer: the number of the sample, the token ids, and
the reason of the sample's end if any."""


class OutputSoFar(msgspec.Struct, forbid_unknown_fields=True):
    """The tokens of one sample of an answer.

    ``finish_reason`` is given if the last token ended the sample.
    """

    token_ids: list[int] = []
    finish_reason: str | None = None


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request that continues an answer: the client's body, and the answer so far.

    ``outputs`` has the samples by number.
    """

    request: msgspec.Raw
    outputs: list[OutputSoFar]
