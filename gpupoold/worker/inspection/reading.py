"""Reading of checkpoints and adapters, with limits of time and memory. Imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.checkpoints.survey import encoded, survey_adapter, survey_checkpoint
from gpupoold.errors import Refused
from gpupoold.system.process import limit_use
from gpupoold.wire.messages import FindParsers, Survey, SurveyAdapter

_MAX_CPU_S = 60.0
_MAX_MEMORY_BYTES = 3 << 30
"""Enough for the headers of a million tensors."""


def read(message: Survey | SurveyAdapter | FindParsers) -> bytes:
    """Return the encoded result of an order; this process can do little else afterwards."""
    limit_use(_MAX_CPU_S, _MAX_MEMORY_BYTES)
    try:
        return encoded(_found(message))
    except MemoryError:
        most = _MAX_MEMORY_BYTES >> 30
        raise Refused(
            f"{message.path}: reading the files takes more than {most} GiB of memory",
            "use the original checkpoint",
        ) from None


def _found(message: Survey | SurveyAdapter | FindParsers) -> Any:
    path = Path(message.path)
    match message:
        case Survey():
            return survey_checkpoint(
                path,
                message.dtype,
                message.engine,
                allow_pickle=message.allow_pickle,
                allow_remote_code=message.allow_remote_code,
                may_be_remote=message.may_be_remote,
            )
        case SurveyAdapter():
            return survey_adapter(path, Path(message.base), allow_pickle=message.allow_pickle)
        case FindParsers():
            return found_parsers(path, message.engine)
