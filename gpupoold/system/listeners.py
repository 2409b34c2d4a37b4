"""The daemon's two sockets: created here, or passed by systemd."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from gpupoold.access.peers import AdminGroups
from gpupoold.api.paths import SOCKET_FILE_NAME
from gpupoold.config.sections import AccessSettings, ServerSettings
from gpupoold.errors import Failed, Refused

_logger = logging.getLogger(__name__)

# The sockets' names in systemd (``FileDescriptorName=``).
HTTP_SOCKET = "http"
ADMIN_SOCKET = "admin"

_HTTP_BACKLOG = 2048
_ADMIN_BACKLOG = 128

TakeSocket = Callable[[str], socket.socket | None]  # a listening socket of systemd by its name

_OWN = 0o600
_OF_GROUP = 0o660
_OF_ALL = 0o666


@contextlib.contextmanager
def http_listener(server: ServerSettings, take: TakeSocket) -> Iterator[socket.socket]:
    """Open the public API's socket, or take the socket from systemd.

    Raises Failed: the address cannot be bound.
    """
    given = take(HTTP_SOCKET)
    if given is not None:
        _check_address(given, server)
    with given or _bound(server) as listener:
        yield listener


@contextlib.contextmanager
def admin_listener(
    runtime_dir: Path, groups: AdminGroups, take: TakeSocket
) -> Iterator[socket.socket]:
    """Open the admin API's socket; remove the file at the end, unless systemd owns the socket.

    Raises:
        Refused: another daemon answers at the path.
        Failed: the socket cannot be made.
    """
    given = take(ADMIN_SOCKET)
    if given is not None:
        with given:
            yield given
        return
    path = runtime_dir / SOCKET_FILE_NAME
    with _bound_unix(path, groups) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def is_local(listener: socket.socket) -> bool:
    """Return whether only processes of this machine can connect, by the socket's address.

    True for a unix socket: the permissions of the socket's file restrict access.
    """
    if listener.family == socket.AF_UNIX:
        return True
    host = listener.getsockname()[0].partition("%")[0]
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def why_keys_are_required(access: AccessSettings, listener: socket.socket) -> str:
    """Return why every request at this socket needs an API key; empty if no key is needed."""
    if not is_local(listener):
        host, port = listener.getsockname()[:2]
        return f"the API listens at {host} port {port}, beyond this machine, and needs API keys"
    if access.require_keys == "always":
        return 'the API needs keys (access.require_keys = "always")'
    return ""


def _bound(server: ServerSettings) -> socket.socket:
    listener = socket.socket(server.family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(_HTTP_BACKLOG)
    except OSError as error:
        listener.close()
        raise Failed(
            f"cannot listen on {server.host}:{server.port}: {error.strerror or error}",
            "change server.host or server.port, or stop the program that uses the port",
        ) from error
    return listener


def _bound_unix(path: Path, groups: AdminGroups) -> socket.socket:
    try:
        if _is_answered(path):
            raise Refused(
                f"another daemon answers at the admin socket {path}",
                "stop that daemon first, or set another paths.runtime_dir for this daemon",
            )
        return _made_unix(path, groups)
    except OSError as error:
        raise Failed(
            f"{path}: the admin socket cannot be made: {error.strerror or error}",
            "change paths.runtime_dir or its permissions",
        ) from error


def _made_unix(path: Path, groups: AdminGroups) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # left by a daemon that was killed
        sock.bind(str(path))
        share_socket(path, groups)
        sock.listen(_ADMIN_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _is_answered(path: Path) -> bool:
    """Return whether a daemon answers; raise OSError if the path cannot be a socket's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _check_address(given: socket.socket, server: ServerSettings) -> None:
    """Log a difference between systemd's socket, which is used, and the configuration."""
    host, port = given.getsockname()[:2]
    if (host, port) != (server.host, server.port):
        _logger.warning(
            "the API listens at %s:%d, the address in gpupoold.socket; server.host and server.port "
            "(%s:%d) are ignored: change the address with `systemctl edit gpupoold.socket`",
            host,
            port,
            server.host,
            server.port,
        )


def share_socket(path: Path, groups: AdminGroups) -> None:
    """Give the admin groups access to the socket if this daemon serves the whole machine.

    A daemon of root, or of a user whose main group is the admin group, serves the machine; another
    user's daemon stays private. A file has one group only: with a group of readers, everybody may
    connect, and the guard checks the caller's credentials. A group whose number is unknown counts
    as absent.

    Raises:
        OSError: the mode cannot be set.
    """
    admins = groups.names.group_id(groups.everything)
    if os.geteuid() != 0 and os.getegid() != admins:
        path.chmod(_OWN)
        return
    if admins is not None:
        # In a user namespace or a container the group may exist without permission to use it.
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, admins)
    readers = groups.names.group_id(groups.read_only)
    path.chmod(_OF_GROUP if readers is None else _OF_ALL)
