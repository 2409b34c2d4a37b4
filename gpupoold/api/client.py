"""The client of the admin API, for the command line and the terminal UI.

Synchronous, over the unix socket. Every failure is one of ``gpupoold.errors``.
"""

from __future__ import annotations

import functools
import grp
import json
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from gpupoold.api.admin_api import AdminApi, Operation
from gpupoold.api.schemas import ErrorBody
from gpupoold.api.schemas_models import Progress
from gpupoold.domain import Event
from gpupoold.errors import (
    DaemonNotRunning,
    Failed,
    GpupoolError,
    Refused,
    TimedOut,
    Unavailable,
    error_from_code,
)

DEFAULT_TIMEOUT_S = 10.0
_ROOTS_GROUP = 0


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


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class AdminClient(AdminApi):
    """A client of the daemon at ``socket_path``; use as a context manager.

    ``timeout_s`` bounds connecting and each plain answer. Long operations (adding, draining,
    following, operations on workers) have no limit on the answer.
    """

    def __init__(self, socket_path: Path | str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.socket_path = Path(socket_path)
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            # Without TLS there is nothing to verify: certificates take 25 ms of a core to read.
            transport=httpx.HTTPTransport(uds=str(socket_path), verify=False),
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
        self._http.close()

    def follow_events(self, after: int | None = None) -> Iterator[Event]:
        """Yield events after ``after``, then new events until the daemon stops."""
        query = {"follow": "true"} | ({} if after is None else {"after": after})
        request = self._request("GET", "/events", query, None, is_unbounded=True)
        yield from self._lines(request, Event)

    def call(
        self,
        operation: Operation,
        parts: Mapping[str, Any],
        query: Mapping[str, Any],
        body: BaseModel | None,
    ) -> Any:
        quoted = {name: quote(str(part), safe="/") for name, part in parts.items()}
        path = operation.path.format_map(quoted)
        request = self._request(
            operation.method, path, query, body, is_unbounded=operation.is_unbounded
        )
        if not operation.is_stream:
            return self._answer(request, operation.answer)
        lines = self._lines(request, operation.answer)
        return _checked(lines, body) if operation.answer is Progress else lines

    def _answer(self, request: httpx.Request, kind: Any) -> Any:
        with self._errors_of(request):
            response = self._http.send(request)
        if response.is_error:
            raise _error_of(response)
        return _parsed(kind, response.content, request)

    def _lines(self, request: httpx.Request, kind: Any) -> Iterator[Any]:
        with self._errors_of(request):
            response = self._http.send(request, stream=True)
            try:
                if response.is_error:
                    response.read()
                    raise _error_of(response)
                for line in split_lines(response.iter_bytes()):
                    if line.strip():
                        yield _parsed(kind, line, request)
            finally:
                response.close()

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: BaseModel | None,
        *,
        is_unbounded: bool,
    ) -> httpx.Request:
        try:
            return self._http.build_request(
                method,
                path,
                params=query,
                json=None if body is None else body.model_dump(mode="json"),
                timeout=httpx.Timeout(
                    self._timeout_s, read=None if is_unbounded else self._timeout_s
                ),
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
        _close_left_socket(error)
        causes = tuple(_causes_of(error))
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
    try:
        found = socket_path.stat()
        group = grp.getgrgid(found.st_gid).gr_name
    except (OSError, KeyError):
        return "run as the daemon's user"
    if found.st_gid == _ROOTS_GROUP or not found.st_mode & stat.S_IWGRP:
        return "run as the daemon's user, or as root"
    return f"ask an administrator to run: usermod -aG {group} NAME; then NAME logs in again"


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause's cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _close_left_socket(error: BaseException) -> None:
    """Close the socket of a failed connection.

    httpcore leaves the socket to the garbage collector, whose warnings would add up in a caller
    that retries until the daemon is up.
    """
    for cause in _causes_of(error):
        for frame, _ in walk_tb(cause.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("httpcore."):
                for value in frame.f_locals.values():
                    if isinstance(value, socket.socket):
                        value.close()


def _as_error(body: ErrorBody) -> GpupoolError:
    return error_from_code(body.code, body.message, body.hint)


def _error_of(response: httpx.Response) -> GpupoolError:
    try:
        error = _as_error(ErrorBody.model_validate(json.loads(response.content)["error"]))
    except (ValueError, KeyError, TypeError):
        request = response.request
        return Failed(
            f"{request.method} {request.url.path} was answered with HTTP {response.status_code}"
            " and no reason",
            "is the process at the socket gpupoold, and of the same version as gpupool?",
        )
    if isinstance(error, Unavailable):
        retry_after = response.headers.get("retry-after", "")
        if retry_after.isdigit():
            error.retry_after_s = float(retry_after)
    return error


def _parsed(kind: Any, content: bytes, request: httpx.Request) -> Any:
    """Return an answer, or a line of one; ``bytes`` stay as they are."""
    if kind is bytes:
        return content
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "the answer"
        what = f"{request.method} {request.url.path}"
        raise Failed(
            f"the daemon's answer to {what} is not understood: {place}: {problem['msg']}",
            "gpupool and gpupoold may be of different versions: restart the daemon after an"
            " upgrade",
        ) from error


def _checked(lines: Iterator[Progress], body: Any) -> Iterator[Progress]:
    """Yield the progress of an addition up to its result.

    Raises GpupoolError: while iterating, when the daemon reports a failure.
    """
    finished = False
    for progress in lines:
        if progress.error is not None:
            raise _as_error(progress.error)
        finished = progress.model is not None or progress.stage == "detached"
        yield progress
    if not finished:
        raise Failed(
            f"the daemon ended the work on {body.name!r} without a result",
            "see `gpupool logs` and `gpupool events`",
        )
