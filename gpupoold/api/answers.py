"""What failed calls of the admin API mean: answers and connections that went wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from traceback import walk_tb

import httpx
from pydantic import ValidationError

from gpupoold.api.schemas import ErrorBody
from gpupoold.errors import Failed, GpupoolError, Unavailable, error_from_code


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def close_left_socket(error: BaseException) -> None:
    """Close the socket of a connection that failed.

    httpcore leaves it to the garbage collector, which warns about it; callers
    that wait for the daemon to come up would collect a warning per attempt.
    """
    for cause in causes_of(error):
        for frame, _ in walk_tb(cause.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("httpcore."):
                for value in frame.f_locals.values():
                    if isinstance(value, socket.socket):
                        value.close()


def as_error(body: ErrorBody) -> GpupoolError:
    """The error that the daemon describes."""
    return error_from_code(body.code, body.message, body.hint)


def error_of(response: httpx.Response) -> GpupoolError:
    """The error a failed answer describes."""
    try:
        error = as_error(ErrorBody.model_validate(json.loads(response.content)["error"]))
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


def not_understood(what: str, error: ValidationError) -> Failed:
    """An answer to ``what`` that is not what this program expects."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the answer"
    return Failed(
        f"the daemon's answer to {what} is not understood: {place}: {problem['msg']}",
        "gpupool and gpupoold may be of different versions: restart the daemon after an upgrade",
    )
