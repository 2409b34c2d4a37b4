"""What a fleet's entrance and a frontend tell each other over HTTP about answers that continue."""

from __future__ import annotations

import msgspec

CONTINUES_HEADER = "x-gpupool-continues"
"""Header of a signed request whose body is a :class:`Continuation`."""

TOKENS_COMMENT = "gpupool-tokens"
"""First word of a comment with the ids of an answer's tokens, and the reason of its end if any."""


class Continuation(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request that continues an answer: the client's body, and the answer so far.

    ``finish_reason`` is given if the last token ended the answer.
    """

    request: msgspec.Raw
    output_token_ids: list[int]
    finish_reason: str | None = None
