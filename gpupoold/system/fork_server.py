"""``python -m gpupoold.system.fork_server``: imports vLLM, then forks the daemon's children.

Importing vLLM takes ten seconds of a core; forking a process with vLLM takes milliseconds and
shares memory. A dead worker is ready again after half a second (``docs/failures.md``). The idea is
that of the standard library's ``multiprocessing.forkserver``, whose children run a function instead
of a module with arguments and a log.

The process has one thread, no signal handler and no open file except the channel, so that a fork
copies nothing unwanted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from gpupoold.system.process import (
    as_words,
    begin_child,
    die_with_parent,
    end_at_faults,
    importing,
    show_as,
)
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel, ChannelClosed

_logger = logging.getLogger("gpupoold.system.fork_server")


def main() -> None:
    """Import modules for the children, then fork on request until the daemon ends."""
    parser = argparse.ArgumentParser(prog="gpupoold.system.fork_server", description=__doc__)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE")
    arguments = parser.parse_args()
    begin_child("fork-server", arguments.log_level, arguments.parent_pid)
    sock = socket.socket(fileno=arguments.wire_fd)
    channel: BlockingChannel[m.ToForkServer] = BlockingChannel(sock, m.ToForkServer)
    with importing():
        for name in arguments.preload:
            _preload(name, arguments.log_level)
    end_at_faults()
    try:
        _serve(sock, channel)
    except ChannelClosed:
        _logger.info("the daemon has closed the connection; exiting")


def _preload(name: str, log_level: str) -> None:
    try:
        importlib.import_module(name).preload(log_level)
    except Exception:  # a child that imports the module reports the error
        _logger.exception("%s could not be imported", name)


def _serve(sock: socket.socket, channel: BlockingChannel[m.ToForkServer]) -> None:
    children: dict[int, int] = {}  # pid of each child, by its pidfd
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                poll.unregister(fd)
                os.close(fd)
                pid = children.pop(fd)
                _, status = os.waitpid(pid, 0)
                channel.send(m.ForkEnded(pid, os.waitstatus_to_exitcode(status)))
        while (message := channel.receive(0)) is not None:
            if isinstance(message, m.KillForked):
                if message.pid in children.values():
                    os.kill(message.pid, signal.SIGKILL)  # not reaped yet, so the pid is not reused
                continue
            try:
                pid, ended_fd = _fork(message, sock, channel, list(children))
            except OSError as error:
                _logger.error("%s could not be forked: %s", message.module, error)
                channel.send(m.ForkFailed(message.call_id, str(error)))
                continue
            children[ended_fd] = pid
            poll.register(ended_fd, select.POLLIN)
            channel.send(m.Forked(message.call_id, pid), (ended_fd,))


def _fork(
    message: m.Fork,
    sock: socket.socket,
    channel: BlockingChannel[m.ToForkServer],
    others: Sequence[int],
) -> tuple[int, int]:
    """Fork the child; return its pid and pidfd.

    Raises:
        OSError: the child could not be forked, watched, or given its descriptors; no child runs.
    """
    fds: list[int] = []
    try:
        for _ in range(len(message.fd_options) + 1):
            fds.append(channel.take_fd())
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(message, parent_pid, fds, sock, others)
    finally:
        for fd in fds:
            os.close(fd)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _become(
    message: m.Fork,
    parent_pid: int,
    fds: Sequence[int],
    channel: socket.socket,
    others: Sequence[int],
) -> None:
    status = 1
    try:
        die_with_parent(parent_pid)
        channel.close()
        for fd in others:
            os.close(fd)
        log_fd, *passed = fds
        _redirect(log_fd)
        options = dict(zip(message.fd_options, passed, strict=True))
        arguments = [*message.arguments, *as_words(options), "--parent-pid", str(parent_pid)]
        os.environ.update(message.environment)
        random.seed()  # otherwise all children would draw equal numbers
        show_as(message.module, arguments)
        sys.argv = [message.module, *arguments]
        importlib.import_module(f"{message.module}.__main__").main()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    except BaseException:
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip the fork server's exit handlers and buffers, which a normal exit would run.
        os._exit(status)


def _redirect(log_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log_fd)


if __name__ == "__main__":
    main()
