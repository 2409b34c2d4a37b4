"""Messages between a frontend and its grammar checker."""

from __future__ import annotations

from typing import Literal

from gpupoold.wire.base import Message
from gpupoold.wire.messages import LoadedModel, ModelToLoad

Outcome = Literal["accepted", "refused", "unknown"]
CHECK_TIMEOUT_S = 60.0
"""Limit of a check by the clock, for a child that waits for a core; the limit of CPU time is
lower.
"""


class GrammarCheck(Message):
    """Compile a grammar once; ``constraint`` is JSON by the names of ``structured_outputs``.

    ``mount_id`` names this mount of the model's API, because another mount may have another
    tokenizer.
    """

    check_id: int
    mount_id: int
    model: ModelToLoad
    loaded: LoadedModel
    constraint: bytes


class GrammarVerdict(Message):
    """The result of a check, and vLLM's ``backend`` for the grammar.

    ``unknown``: the check was impossible now and may be repeated.
    """

    check_id: int
    outcome: Outcome
    backend: str = ""
    reason: str = ""
