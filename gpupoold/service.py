"""``gpupoold``: boot in a readable order, run, stop in reverse."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gpupool_state import DATABASE_NAME, Database, History, StateLock
from gpupoold import __version__
from gpupoold.access.peers import AdminGroups
from gpupoold.access.tls import check_files
from gpupoold.admin.app import Door, Guard, build_app
from gpupoold.api.paths import check_runtime_dir
from gpupoold.config.file import check_gpus_found, read_config_file
from gpupoold.config.fitting import fitted
from gpupoold.config.schema import Settings
from gpupoold.control.control_plane import ControlPlane, build_control_plane
from gpupoold.control.operations import Configuration, history_limits
from gpupoold.control.weights import kept_snapshots
from gpupoold.doctor.machine import find_machine
from gpupoold.engine_versions import drop_unlisted, set_platform
from gpupoold.errors import Failed, GpupoolError
from gpupoold.files import hint_to_write
from gpupoold.logs.setup import start_logging
from gpupoold.metrics.exposition import Exporter
from gpupoold.system import systemd
from gpupoold.system.http_protocol import Server, server_config
from gpupoold.system.listeners import admin_listener, http_listener
from gpupoold.system.process import raise_file_limit, settle_collector

_logger = logging.getLogger("gpupoold")

_KILLING_S = 30.0
_NAMES_LIMIT_S = 5.0


def main() -> None:
    raise_file_limit()
    faulthandler.enable()  # the watchdog ends a stuck daemon by SIGABRT
    arguments = argument_parser().parse_args()
    try:
        file = read_config_file(arguments.config)
        machine = find_machine(file.settings)
        check_gpus_found(file, machine)
        if arguments.check_config:
            fitted(file.settings, machine)
            print(f"{file.path or 'no file, the defaults'}: valid")
            return
        _prepare_folders(file.settings)
        start_logging(file.settings)
        _drop_unlisted_variables(file.settings)
        set_platform(os.environ, {device.kind for device in file.settings.devices})
        configuration = Configuration(file, arguments.config)
        asyncio.run(serve(configuration, systemd.take_environment(os.environ, os.getpid())))
    except GpupoolError as error:
        print(f"gpupoold: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _drop_unlisted_variables(settings: Settings) -> None:
    dropped = drop_unlisted(os.environ, settings.security.vllm_variables)
    if dropped:
        _logger.warning(
            "environment variables hidden from vLLM: %s; to pass a variable, add its name to "
            "security.vllm_variables",
            ", ".join(dropped),
        )


async def serve(configuration: Configuration, environment: systemd.Environment) -> None:
    """Start all parts of the daemon in order, serve, and stop the parts in reverse order.

    Raises GpupoolError: the state folder, a socket or the database cannot be used.
    """
    settings = configuration.settings
    notifier = systemd.Notifier(environment.notify_address)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        server = settings.server
        if server.tls_cert is not None and server.tls_key is not None:
            expires_at = check_files(server.tls_cert, server.tls_key)
            _logger.info("the certificate is valid until %s", expires_at.date())
        stack.enter_context(StateLock.acquire(settings.paths.state_dir))
        inherited = stack.enter_context(systemd.Inherited(environment.fds))
        listener = stack.enter_context(http_listener(settings.server, inherited.socket))
        database = await Database.open(settings.paths.state_dir / DATABASE_NAME)
        await stack.enter_async_context(database)
        history = History(database, history_limits(settings.history))
        await history.start()
        stack.push_async_callback(history.stop)
        fd_store = systemd.FdStore(notifier, inherited.named(kept_snapshots.PREFIX))
        control_plane = await build_control_plane(
            configuration, database, history, listener, fd_store
        )
        exporter = Exporter(control_plane)
        on_hangup = hangup_handler(
            sys.stderr.fileno(), stop.set, lambda: control_plane.reloader.begin(notifier.reloading)
        )
        groups = AdminGroups(settings.access.admin_group, settings.access.read_only_group)
        if not await groups.look_up(_NAMES_LIMIT_S):
            _logger.warning(
                "the name service does not answer, so the groups of the admin socket cannot open "
                "the socket: restart gpupoold when the name service answers"
            )
        admin = admin_listener(settings.paths.runtime_dir, groups, inherited.socket)
        admin_socket = stack.enter_context(admin)
        await stack.enter_async_context(
            _running_admin(control_plane, exporter, groups, admin_socket)
        )
        inherited.close()
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        await control_plane.minutes.restore()
        control_plane.start(exporter.text)
        stack.push_async_callback(control_plane.stop)
        _logger.info("gpupoold %s serves at %s", __version__, control_plane.http_url)
        history.record_event("info", "daemon_started", "gpupoold", f"version {__version__}")
        health = control_plane.health
        async with systemd.informed(
            notifier, environment.watchdog_s, health.summary, health.failure_reason
        ):
            settle_collector()
            notifier.ready()
            await stop.wait()
        _logger.info("stopping")
        # The frontends, then the workers have the grace time; who still runs is killed.
        notifier.stopping(2 * settings.limits.stop_grace_s + _KILLING_S)


@contextlib.asynccontextmanager
async def _running_admin(
    control_plane: ControlPlane, exporter: Exporter, groups: AdminGroups, listener: socket.socket
) -> AsyncIterator[None]:
    app = Guard(build_app(control_plane, exporter), groups)
    server = Server(server_config(app, Door(groups).protocol(), timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]), name="admin")
    try:
        yield
    finally:
        control_plane.stopping = True
        server.should_exit = True
        await asyncio.wait([task])


def _prepare_folders(settings: Settings) -> None:
    paths = settings.paths
    # Members of the admin group must reach the socket, the only file there.
    runtime_mode = 0o755 if os.geteuid() == 0 else 0o700
    modes = {paths.state_dir: 0o700, paths.log_dir: 0o700, paths.runtime_dir: runtime_mode}
    for folder, mode in modes.items():
        try:
            folder.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            raise Failed(
                f"{folder}: cannot be created: {error.strerror}",
                hint_to_write(folder) or "change [paths] or its permissions",
            ) from error
        if hint := hint_to_write(folder):
            raise Failed(f"{folder}: cannot be written", hint)
    check_runtime_dir(paths.runtime_dir)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the daemon's command line, of which the manual page is made too."""
    parser = argparse.ArgumentParser(
        prog="gpupoold",
        description="Daemon that serves many LLMs on few GPUs; controlled by `gpupool`.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="the configuration; default: $GPUPOOL_CONFIG or /etc/gpupool/gpupool.toml",
    )
    parser.add_argument(
        "--check-config", action="store_true", help="check the configuration file and exit"
    )
    parser.add_argument(
        "--version", action="version", version=__version__, help="print the version and exit"
    )
    return parser


def hangup_handler(
    fd: int, on_closed: Callable[[], None], on_reload: Callable[[], None]
) -> Callable[[], None]:
    """Return a handler that calls ``on_closed`` if ``fd`` was a terminal and no longer is.

    Otherwise the handler calls ``on_reload``.
    """
    had_terminal = os.isatty(fd)

    def handle() -> None:
        if had_terminal and not os.isatty(fd):
            on_closed()
        else:
            on_reload()

    return handle
