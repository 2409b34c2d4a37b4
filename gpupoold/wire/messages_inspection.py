"""Messages between the daemon and an inspection."""

from __future__ import annotations

from gpupoold.wire.base import Message
from gpupoold.wire.records import ModelToLoad


class Inspect(Message):
    """Check a model for an emulated device or a GPU, and for groups of ``degrees`` GPUs (daemon →
    inspection).

    With ``only_chat`` only the tokenizer and the chat template are checked.
    """

    model: ModelToLoad
    is_emulated: bool
    degrees: tuple[int, ...] = ()
    only_chat: bool = False


class Survey(Message):
    """Read and check the files of a checkpoint (daemon → inspection).

    With ``may_be_remote`` the weights may be beginnings that a download fetched.
    """

    path: str
    dtype: str
    engine: dict[str, str]
    allow_pickle: bool
    allow_remote_code: bool
    may_be_remote: bool = False


class SurveyAdapter(Message):
    """Read and check the files of an adapter for the checkpoint ``base`` (daemon → inspection)."""

    path: str
    base: str
    allow_pickle: bool


class FindParsers(Message):
    """Find the parsers and the chat template of a checkpoint (daemon → inspection)."""

    path: str
    engine: dict[str, str]


class Inspected(Message):
    """The result of an inspection; ``error_code`` is set if the model cannot be served.

    ``undivided`` has the degrees of groups that cannot divide the model, with the reason.
    ``result`` is what a survey or a search found, in the encoding of
    :mod:`gpupoold.checkpoints.survey`.
    """

    error_code: str = ""
    error_message: str = ""
    error_hint: str = ""
    undivided: dict[int, str] = {}
    result: bytes = b""


ToInspection = Inspect | Survey | SurveyAdapter | FindParsers
