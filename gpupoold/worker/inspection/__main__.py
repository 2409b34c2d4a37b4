"""``python -m gpupoold.worker.inspection``: reads or checks one model's files, then exits.

A hostile configuration can only end this process.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket

from gpupoold.errors import GpupoolError
from gpupoold.system.process import WORKER_OOM_SCORE_ADJ, begin_child, importing, raise_oom_score
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import Inspect, Inspected, ToInspection
from gpupoold.worker.environment import set_engine_environment

_logger = logging.getLogger("gpupoold.worker.inspection")


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
            from gpupoold.worker.inspection.reading import read

            return Inspected(result=read(message))
        with importing():
            from gpupoold.worker.inspection.inspect import inspect
        return Inspected(undivided=inspect(message))
    except GpupoolError as error:
        _logger.info("%s", error)
        return Inspected(error.code, error.message, error.hint)


if __name__ == "__main__":
    main()
