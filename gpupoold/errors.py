"""The errors shown to users.

GpupoolError
├── ClientError            the caller can correct the cause
│   ├── UsageError         malformed or contradictory input      (exit 2, HTTP 400)
│   ├── ConfigError        the configuration file is wrong       (exit 2)
│   │   └── SettingError   this machine cannot have a setting    (exit 2)
│   ├── NoSuchModel        name not in the registry              (exit 4, HTTP 404)
│   ├── NoSuchKey          no API key has that name              (exit 4, HTTP 404)
│   ├── NoSuchRequest      no such live request                  (exit 4, HTTP 404)
│   ├── Refused            understood, but refused               (exit 5, HTTP 409)
│   └── Forbidden          the caller lacks the right            (exit 5, HTTP 403)
└── ServerError            the daemon or the machine is at fault
    ├── Failed             an attempt failed                     (exit 1, HTTP 500)
        ├── Unavailable        not now; retry after ``retry_after_s`` (exit 1, HTTP 503)
    ├── DaemonNotRunning   nothing answers at the admin socket   (exit 3)
    └── TimedOut           no answer within the time allowed     (exit 6, HTTP 504)

``message`` names the problem and its place, ``hint`` the remedy.
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
    """An error whose cause the caller can correct."""


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


class SettingError(ConfigError):
    """A setting that this machine cannot have; ``key`` is the dotted key to change."""

    def __init__(self, key: str, what: str, hint: str) -> None:
        super().__init__(f"{key}: {what}", hint)
        self.key = key
        self.what = what


class NoSuchModel(ClientError):
    """The name is neither a registered model nor an alias."""

    code = "no_such_model"
    exit_code = 4
    http_status = 404


class NoSuchRequest(ClientError):
    """No live request has the id."""

    code = "no_such_request"
    exit_code = 4
    http_status = 404


def no_such_device(number: int, num_devices: int) -> UsageError:
    """Return the error of a device's number that is not there."""
    known = f"the devices are 0 to {num_devices - 1}" if num_devices > 1 else "the only device is 0"
    return UsageError(f"there is no device {number}", known)


class Refused(ClientError):
    """The request was understood and refused."""

    code = "refused"
    exit_code = 5
    http_status = 409


class NoSuchKey(ClientError):
    """No API key has the name."""

    code = "no_such_key"
    exit_code = 4
    http_status = 404


class Forbidden(ClientError):
    """The caller lacks the right for the operation."""

    code = "forbidden"
    exit_code = 5
    http_status = 403


class ServerError(GpupoolError):
    """An error of the daemon or the machine."""


class Failed(ServerError):
    """An attempt failed."""

    code = "failed"


class Unavailable(ServerError):
    """The operation is impossible now; retry after ``retry_after_s``."""

    code = "unavailable"
    http_status = 503

    def __init__(self, message: str, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class DaemonNotRunning(ServerError):
    """No daemon answers at the admin socket."""

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
    """Return the error described by another process; an unknown code becomes ``Failed``."""
    for kind in ALL_ERRORS:
        if kind.code == code:
            return kind(message, hint)
    return Failed(message, hint)
