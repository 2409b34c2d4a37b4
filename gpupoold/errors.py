"""Every error a user can see.

GpupoolError
├── ClientError            the caller can mend it
│   ├── UsageError         malformed or contradictory input      (exit 2, HTTP 400)
│   ├── ConfigError        the configuration file is wrong       (exit 2)
│   ├── NoSuchModel        name not in the registry              (exit 4, HTTP 404)
│   ├── NoSuchKey          no API key has that name              (exit 4, HTTP 404)
│   ├── NoSuchRequest      no such live request                  (exit 4, HTTP 404)
│   ├── Refused            understood, but will not be done      (exit 5, HTTP 409)
│   └── Forbidden          the caller may not do that            (exit 5, HTTP 403)
└── ServerError            the daemon or the machine is at fault
    ├── Failed             it was tried and did not work         (exit 1, HTTP 500)
    ├── Unavailable        not now; ``retry_after_s`` says when   (exit 1, HTTP 503)
    ├── DaemonNotRunning   nothing answers at the admin socket   (exit 3)
    └── TimedOut           no answer within the time allowed     (exit 6, HTTP 504)

``message`` says what was wrong and where, ``hint`` what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class GpupoolError(Exception):
    """Base of all errors shown to users; never raised itself."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ClientError(GpupoolError):
    """The caller can mend it."""


class UsageError(ClientError):
    """Malformed or contradictory input."""

    code = "usage"
    exit_code = 2
    http_status = 400


class ConfigError(ClientError):
    """The configuration file is wrong."""

    code = "config"
    exit_code = 2
    http_status = 400


class NoSuchModel(ClientError):
    """The name is neither a registered model nor an alias."""

    code = "no_such_model"
    exit_code = 4
    http_status = 404


class NoSuchRequest(ClientError):
    """The id is not that of a live request."""

    code = "no_such_request"
    exit_code = 4
    http_status = 404


class Refused(ClientError):
    """Understood, but will not be done."""

    code = "refused"
    exit_code = 5
    http_status = 409


class NoSuchKey(ClientError):
    """No API key has the name."""

    code = "no_such_key"
    exit_code = 4
    http_status = 404


class Forbidden(ClientError):
    """The caller may not do that."""

    code = "forbidden"
    exit_code = 5
    http_status = 403


class ServerError(GpupoolError):
    """The daemon or the machine is at fault."""


class Failed(ServerError):
    """An attempt failed."""

    code = "failed"


class Unavailable(ServerError):
    """Not now; ``retry_after_s`` says when to ask again."""

    code = "unavailable"
    http_status = 503

    def __init__(self, message: str, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class DaemonNotRunning(ServerError):
    """Nothing answers at the admin socket."""

    code = "daemon_not_running"
    exit_code = 3


class TimedOut(ServerError):
    """No answer within the time allowed."""

    code = "timed_out"
    exit_code = 6
    http_status = 504


ALL_ERRORS: tuple[type[GpupoolError], ...] = (
    UsageError,
    ConfigError,
    NoSuchModel,
    NoSuchKey,
    NoSuchRequest,
    Refused,
    Forbidden,
    Failed,
    Unavailable,
    DaemonNotRunning,
    TimedOut,
)


def error_from_code(code: str, message: str, hint: str = "") -> GpupoolError:
    """Return the error that another process described; an unknown code becomes ``Failed``."""
    for kind in ALL_ERRORS:
        if kind.code == code:
            return kind(message, hint)
    return Failed(message, hint)
