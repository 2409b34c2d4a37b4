"""``python -m gpupoold.fork_server``: has imported vLLM, and forks the daemon's children.

Importing vLLM takes ten seconds of a core, forking a process that has done so some
milliseconds, and its memory is shared. So a worker that died is ready again after half a
second (``docs/failures.md``). (The idea is that of the standard library's
``multiprocessing.forkserver``, which gives its children another life: they run a function,
and not a module with arguments and a log of its own.)

One thread, no handler, no open file but the channel: what a fork copies is what is meant to
be there.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import select
import socket
import sys
import traceback
from collections.abc import Sequence

from gpupoold.process import as_words, begin_child, die_with_parent, importing
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel, ChannelClosed

_logger = logging.getLogger("gpupoold.fork_server")


def main() -> None:
    """Import what children will want, then fork when told, until the daemon is gone."""
    parser = argparse.ArgumentParser(prog="gpupoold.fork_server", description=__doc__)
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
    try:
        _serve(sock, channel)
    except ChannelClosed:
        _logger.info("the daemon is gone, leaving")


def _preload(name: str, log_level: str) -> None:
    try:
        importlib.import_module(name).preload(log_level)
    except Exception:  # children that want it will say so where somebody asks
        _logger.exception("%s could not be imported", name)


def _serve(sock: socket.socket, channel: BlockingChannel[m.ToForkServer]) -> None:
    children: dict[int, int] = {}  # pid of each, by the descriptor that tells its end
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
            fds = [channel.take_fd() for _ in range(len(message.fd_options) + 1)]
            parent_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become(message, parent_pid, fds, sock, list(children))
            for fd in fds:
                os.close(fd)
            ended_fd = os.pidfd_open(pid)
            children[ended_fd] = pid
            poll.register(ended_fd, select.POLLIN)
            channel.send(m.Forked(message.call_id, pid), (ended_fd,))


def _become(
    message: m.Fork,
    parent_pid: int,
    fds: Sequence[int],
    channel: socket.socket,
    others: Sequence[int],
) -> None:
    """Be the child that was asked for; does not return."""
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
        random.seed()  # else all of them would draw the same
        _rename(message.module, arguments)
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
        # Not the fork server's end: neither its exit handlers nor its buffers.
        os._exit(status)


def _redirect(log_fd: int) -> None:
    """Nothing to read, and the log to write to."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log_fd)


def _rename(module: str, arguments: Sequence[str]) -> None:
    """What ``ps`` shows: as if it had been started by hand."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(" ".join([sys.executable, "-m", module, *arguments]))


if __name__ == "__main__":
    main()
