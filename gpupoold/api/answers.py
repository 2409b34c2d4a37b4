"""Errors of admin API calls, from answers and from failed connections."""

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
    """Yield the error, its cause, the cause's cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def close_left_socket(error: BaseException) -> None:
    """Close the socket of a failed connection.

    httpcore leaves the socket to the garbage collector, whose warnings would add up in a caller
    that retries until the daemon is up.
    """
    for cause in causes_of(error):
        for frame, _ in walk_tb(cause.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("httpcore."):
                for value in frame.f_locals.values():
                    if isinstance(value, socket.socket):
                        value.close()


def as_error(body: ErrorBody) -> GpupoolError:
    """Return the error described by an error body."""
    return error_from_code(body.code, body.message, body.hint)


def error_of(response: httpx.Response) -> GpupoolError:
    """Return the error described by a failed answer."""
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
    """Return the error for an answer to ``what`` that this version cannot parse."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the answer"
    return Failed(
        f"the daemon's answer to {what} is not understood: {place}: {problem['msg']}",
        "gpupool and gpupoold may be of different versions: restart the daemon after an upgrade",
    )
