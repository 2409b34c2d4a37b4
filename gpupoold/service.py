"""``gpupoold``: boot in a readable order, run, stop in reverse."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn

from gpupool_state import (
    DATABASE_NAME,
    Database,
    History,
    HistoryLimits,
    Registry,
    StateLock,
)
from gpupoold import __version__
from gpupoold.admin.app import build_app
from gpupoold.admin.paths import SOCKET_FILE_NAME
from gpupoold.config import ServerSettings, Settings, load_settings
from gpupoold.errors import Failed, GpupoolError, Refused
from gpupoold.pool.pool import Pool, build_pool

_logger = logging.getLogger("gpupoold")

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LISTEN_BACKLOG = 2048


def main() -> None:
    """Run the daemon until a signal ends it."""
    arguments = _parse()
    try:
        settings = load_settings(arguments.config)
        _prepare_folders(settings)
        _start_logging(settings)
        asyncio.run(serve(settings))
    except GpupoolError as error:
        print(f"gpupoold: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


async def serve(settings: Settings) -> None:
    """Everything the daemon does, in order; what was started stops in reverse.

    Raises:
        GpupoolError: the state folder, a socket or the database cannot be used.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(StateLock.acquire(settings.paths.state_dir))
        listener = stack.enter_context(_listen(settings.server))
        database = await Database.open(settings.paths.state_dir / DATABASE_NAME)
        await stack.enter_async_context(database)
        history = await stack.enter_async_context(_running_history(database, settings))
        pool = build_pool(settings, Registry(database), history, listener)
        await stack.enter_async_context(_running_admin(pool, settings.paths.runtime_dir))
        await stack.enter_async_context(_running_pool(pool))
        _logger.info("gpupoold %s serves at %s", __version__, pool.http_url)
        history.record_event("info", "daemon_started", "gpupoold", f"version {__version__}")
        await stop.wait()
        _logger.info("stopping")


@contextlib.asynccontextmanager
async def _running_history(database: Database, settings: Settings) -> AsyncIterator[History]:
    limits = HistoryLimits(
        num_requests=settings.history.max_requests,
        num_switches=settings.history.max_switches,
        num_events=settings.history.max_events,
        num_minutes=settings.history.max_minutes,
    )
    history = History(database, limits)
    await history.start()
    try:
        yield history
    finally:
        await history.stop()


@contextlib.asynccontextmanager
async def _running_pool(pool: Pool) -> AsyncIterator[None]:
    await pool.minutes.restore()
    pool.start()
    try:
        yield
    finally:
        await pool.stop()


@contextlib.asynccontextmanager
async def _running_admin(pool: Pool, runtime_dir: Path) -> AsyncIterator[None]:
    path = runtime_dir / SOCKET_FILE_NAME
    sock = _admin_socket(path)
    config = uvicorn.Config(
        build_app(pool),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([sock]), name="admin")
    try:
        yield
    finally:
        pool.stopping = True
        server.should_exit = True
        await asyncio.wait([task])
        path.unlink(missing_ok=True)


def _admin_socket(path: Path) -> socket.socket:
    if _is_answered(path):
        raise Refused(
            f"another daemon answers at the admin socket {path}",
            "stop it first, or give this one another paths.runtime_dir",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # left by a daemon that was killed
        sock.bind(str(path))
        os.chmod(path, 0o660)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise Failed(
            f"{path}: the admin socket cannot be made: {error.strerror or error}",
            "change paths.runtime_dir or its permissions",
        ) from error
    return sock


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers: signals are the daemon's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(server: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise Failed(
            f"cannot listen on {server.host}:{server.port}: {error.strerror or error}",
            "change server.host or server.port, or stop what uses the port",
        ) from error
    return listener


def _prepare_folders(settings: Settings) -> None:
    paths = settings.paths
    for folder in (paths.state_dir, paths.log_dir, paths.runtime_dir):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Failed(
                f"{folder}: cannot be made: {error.strerror}", "change [paths] or its permissions"
            ) from error


def _start_logging(settings: Settings) -> None:
    try:
        file = logging.FileHandler(settings.paths.log_dir / "gpupoold.log")
    except OSError as error:
        raise Failed(
            f"{settings.paths.log_dir}: cannot be written: {error.strerror}",
            "change paths.log_dir or its permissions",
        ) from error
    logging.basicConfig(
        level=settings.log.level.upper(),
        format=_LOG_FORMAT,
        handlers=[file, logging.StreamHandler(sys.stderr)],
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpupoold", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; see docs/configuration.md")
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args()


if __name__ == "__main__":
    main()
