"""``python -m gpupoold.worker.inspection``: reads or checks one model's files, then exits.

A hostile configuration can only end this process.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from pathlib import Path
from typing import Any

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.checkpoints.survey import encoded, survey_adapter, survey_checkpoint
from gpupoold.errors import GpupoolError, Refused
from gpupoold.system.process import (
    WORKER_OOM_SCORE_ADJ,
    begin_child,
    importing,
    limit_use,
    raise_oom_score,
)
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import (
    FindParsers,
    Inspect,
    Inspected,
    Survey,
    SurveyAdapter,
    ToInspection,
)
from gpupoold.worker.process import set_engine_environment

_logger = logging.getLogger("gpupoold.worker.inspection")
_MAX_CPU_S = 60.0
_MAX_MEMORY_BYTES = 3 << 30
"""Enough for the headers of a million tensors."""


def main() -> None:
    """Answer one order."""
    parser = argparse.ArgumentParser(prog="gpupoold.worker.inspection", description=__doc__)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    begin_child("inspection", arguments.log_level, arguments.parent_pid)
    raise_oom_score(WORKER_OOM_SCORE_ADJ)
    set_engine_environment(arguments.log_level)
    sock = socket.socket(fileno=arguments.wire_fd)
    channel: BlockingChannel[ToInspection] = BlockingChannel(sock, ToInspection)
    try:
        message = channel.receive(None)
        if message is not None:
            channel.send(_answer(message))
    except ChannelClosed:
        _logger.info("the daemon no longer waits")
    logging.shutdown()
    os._exit(0)  # threads of libraries would delay a normal exit


def _answer(message: ToInspection) -> Inspected:
    try:
        if not isinstance(message, Inspect):
            return Inspected(result=_read(message))
        with importing():
            from gpupoold.worker.inspection.inspect import inspect
        return Inspected(undivided=inspect(message))
    except GpupoolError as error:
        _logger.info("%s", error)
        return Inspected(error.code, error.message, error.hint)


def _read(message: Survey | SurveyAdapter | FindParsers) -> bytes:
    """Read a checkpoint or an adapter with limits of time and memory; return the encoded result.

    This process can do little else afterwards. No engine is imported.
    """
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


if __name__ == "__main__":
    main()
