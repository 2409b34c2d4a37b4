"""Calls over the admin socket: requests, typed answers, errors of ``gpupoold.errors``."""

from __future__ import annotations

import grp
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from gpupoold.api.answers import (
    causes_of,
    close_left_socket,
    error_of,
    not_understood,
)
from gpupoold.errors import (
    DaemonNotRunning,
    Failed,
    GpupoolError,
    Refused,
    TimedOut,
    Unavailable,
)

DEFAULT_TIMEOUT_S = 10.0
_ROOTS_GROUP = 0
Query = Mapping[str, str | float]
_T = TypeVar("_T")


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the lines of a byte stream without line ends, split at ``\n`` only.

    ``httpx``'s ``iter_lines`` also splits at U+2028, U+0085 and others, which JSON strings may
    contain unescaped.
    """
    pending: list[bytes] = []
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            yield b"".join([*pending, piece]).removesuffix(b"\r")
            pending.clear()
        if rest:
            pending.append(rest)
    if pending:
        yield b"".join(pending)


def given(**values: str | float | None) -> dict[str, str | float]:
    """Return the query parameters that have a value."""
    return {key: value for key, value in values.items() if value is not None}


class AdminCalls:
    """Connections to the daemon at ``socket_path``; use as a context manager."""

    def __init__(self, socket_path: Path | str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.socket_path = Path(socket_path)
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path)),
            base_url="http://gpupoold",
            timeout=timeout_s,
            trust_env=False,  # a proxy from the environment would replace the socket
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and open streams."""
        self._http.close()

    def _call(
        self,
        answer: TypeAdapter[_T],
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: BaseModel | None = None,
        unbounded: bool = False,
    ) -> _T:
        request = self._request(method, path, query, body, unbounded)
        with self._errors_of(request):
            response = self._http.send(request)
        if response.is_error:
            raise error_of(response)
        try:
            return answer.validate_json(response.content)
        except ValidationError as error:
            raise not_understood(f"{method} {path}", error) from error

    def _stream(
        self, method: str, path: str, *, query: Query | None = None, body: BaseModel | None = None
    ) -> Iterator[bytes]:
        request = self._request(method, path, query, body, unbounded=True)
        with self._errors_of(request):
            response = self._http.send(request, stream=True)
            try:
                if response.is_error:
                    response.read()
                    raise error_of(response)
                yield from (line for line in split_lines(response.iter_bytes()) if line.strip())
            finally:
                response.close()

    def _request(
        self, method: str, path: str, query: Query | None, body: BaseModel | None, unbounded: bool
    ) -> httpx.Request:
        try:
            return self._http.build_request(
                method,
                path,
                params=query,
                json=None if body is None else body.model_dump(mode="json"),
                timeout=httpx.Timeout(self._timeout_s, read=None if unbounded else self._timeout_s),
            )
        except ValueError as error:  # half of a surrogate pair, or no finite number
            raise Refused(f"a value cannot be sent: {str(error)[:300]}", "change it") from error

    @contextmanager
    def _errors_of(self, request: httpx.Request) -> Iterator[None]:
        """Convert ``httpx``'s errors to errors of ``gpupoold.errors``."""
        what = f"{request.method} {request.url.path}"
        try:
            yield
        except httpx.TimeoutException as error:
            raise TimedOut(
                f"the daemon did not answer {what} within {self._timeout_s:g} s",
                "the daemon may be overloaded: see `gpupool logs`, or try again",
            ) from error
        except httpx.ConnectError as error:
            raise self._connect_error(error) from error
        except httpx.RequestError as error:
            raise Failed(
                f"the daemon closed the connection during {what}",
                "the daemon may have stopped: see `gpupool status` and `gpupool logs`",
            ) from error

    def _connect_error(self, error: BaseException) -> GpupoolError:
        close_left_socket(error)
        causes = tuple(causes_of(error))
        if any(isinstance(cause, PermissionError) for cause in causes):
            return Refused(
                f"no permission to open the admin socket {self.socket_path}",
                _permission_hint(self.socket_path),
            )
        if any(isinstance(cause, BlockingIOError) for cause in causes):
            return Unavailable(
                f"the daemon at {self.socket_path} has too many callers waiting", "try again"
            )
        return DaemonNotRunning(
            f"no daemon answers at {self.socket_path}",
            "start the daemon with `gpupoold` or `systemctl start gpupoold`,"
            " or name the daemon's socket with --socket or GPUPOOL_SOCKET",
        )


def _permission_hint(socket_path: Path) -> str:
    """Return the hint for a socket without permission for this user."""
    try:
        found = socket_path.stat()
        group = grp.getgrgid(found.st_gid).gr_name
    except (OSError, KeyError):
        return "run as the daemon's user"
    if found.st_gid == _ROOTS_GROUP or not found.st_mode & stat.S_IWGRP:
        return "run as the daemon's user, or as root"
    return f"ask an administrator to run: usermod -aG {group} NAME; then NAME logs in again"
