"""Types of configuration values (sizes, durations, paths, lists), and the base of sections."""

from __future__ import annotations

import math
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.fields import FieldInfo

from gpupoold.api.paths import MAX_SOCKET_PATH_BYTES, SOCKET_FILE_NAME
from gpupoold.units import exact_duration, exact_size, parse_duration_s, parse_size_bytes


class Effect(StrEnum):
    """The time at which a reload applies a changed key."""

    LIVE = "live"
    """At once."""
    LOADS = "loads"
    """At later loads of models; loaded models keep the old value."""
    RESTART = "restart"
    """Not before ``gpupoold`` is started again."""


AUTO = "auto"
"""Spelling of a value that is worked out from the machine."""


MAX_DURATION_S = 10 * 365 * 86_400.0
MAX_BYTES = 1 << 60
MAX_COUNT = (1 << 31) - 1


def _size(value: object) -> object:
    if isinstance(value, str):
        return parse_size_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError('write a size such as "24GiB", or a whole number of bytes')


def _rate(value: object) -> object:
    if isinstance(value, str) and value.endswith("/s"):
        return parse_size_bytes(value.removesuffix("/s"))
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError('write bytes per second such as "2GB/s"')


def _size_or_auto(value: object) -> object:
    if value is None or value == AUTO:
        return None
    try:
        return _size(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "{AUTO}"') from error


def _duration(value: object) -> object:
    if isinstance(value, str):
        return parse_duration_s(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError('write a duration such as "500ms" or "4s", or a number of seconds')


def check_host(host: str) -> str:
    """Return ``host``, which a socket may listen at.

    Raises ValueError: an address of version 6 has brackets, as in a URL.
    """
    if host.startswith("["):
        raise ValueError(f'{host!r}: write the address without brackets, such as "::1"')
    return host


def check_socket_folder(folder: Path) -> Path:
    """Return the folder, in which the admin socket can be made.

    Raises ValueError: the path of the socket is longer than the kernel allows.
    """
    path = folder / SOCKET_FILE_NAME
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"the admin socket {path} has a path of {num_bytes} bytes, and Linux allows "
            f"{MAX_SOCKET_PATH_BYTES}: choose a shorter folder, such as /run/gpupool"
        )
    return folder


def _path(value: object) -> object:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("write a path as text")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{value!r}: {error}") from error
    if not path.is_absolute():
        raise ValueError(f"{value!r} is relative; begin with / or ~")
    return path


def _host_names(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("write a list of host names")
    for name in value:
        if not isinstance(name, str) or not _HOST_NAME.fullmatch(name.lower()):
            raise ValueError(f"{name!r} is not a host name; leave scheme, port and path out")
    return tuple(text.lower() for text in value)


def _origins(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) > _MAX_ORIGINS:
        raise ValueError(f"write a list of at most {_MAX_ORIGINS} origins")
    if ANY_ORIGIN in value and len(value) > 1:
        raise ValueError('"*" includes all origins; leave the others out')
    for origin in value:
        if not isinstance(origin, str) or not (
            origin == ANY_ORIGIN or _ORIGIN.fullmatch(origin.lower())
        ):
            raise ValueError(
                f'{origin!r} is not an origin such as "https://app.example:8443"; write scheme and '
                "host as a browser sends them, and leave the path and its first / out"
            )
    return tuple(text.lower() for text in value)


def as_tuple(value: object) -> object:
    """Convert a TOML list to a tuple. Raises ValueError: ``value`` is not a list."""
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError("write a list")


# A name by RFC 1123, or an IPv4 or IPv6 address.
_HOST_NAME = re.compile(r"[0-9a-z]([0-9a-z._-]{0,251}[0-9a-z])?|[0-9a-f:]*:[0-9a-f:.]*")

# Scheme, host and port, as the header ``Origin`` has them.
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]{0,31}://(\[[0-9a-f:.]{2,45}\]|[0-9a-z_]([0-9a-z._-]{0,251}[0-9a-z])?)"
    r"(:[0-9]{1,5})?"
)
ANY_ORIGIN = "*"
_MAX_ORIGINS = 100

# JSON spells sizes and durations as a configuration file does, such as "24GiB" and "4s".
_as_size = PlainSerializer(exact_size, when_used="json")
_as_rate = PlainSerializer(lambda rate: f"{exact_size(rate)}/s", str, when_used="json")
_as_duration = PlainSerializer(exact_duration, when_used="json")

Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=MAX_BYTES), _as_size]
PositiveSize = Annotated[int, BeforeValidator(_size), Field(gt=0, le=MAX_BYTES), _as_size]
AutoSize = Annotated[
    Annotated[int, Field(ge=0, le=MAX_BYTES), _as_size] | None, BeforeValidator(_size_or_auto)
]
"""A size; None, spelled "auto", for a size worked out from the machine."""
AutoPositiveSize = Annotated[
    Annotated[int, Field(gt=0, le=MAX_BYTES), _as_size] | None, BeforeValidator(_size_or_auto)
]
LinkRate = Annotated[int, BeforeValidator(_rate), Field(ge=10**6, le=10**12), _as_rate]
"""Bytes per second of a link, from 1 MB/s to 1 TB/s."""
Duration = Annotated[
    float, BeforeValidator(_duration), Field(gt=0, le=MAX_DURATION_S), _as_duration
]
DurationOrZero = Annotated[
    float, BeforeValidator(_duration), Field(ge=0, le=MAX_DURATION_S), _as_duration
]
AbsolutePath = Annotated[Path, BeforeValidator(_path)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
HostNames = Annotated[tuple[str, ...], BeforeValidator(_host_names)]
Origins = Annotated[tuple[str, ...], BeforeValidator(_origins)]


class Section(BaseModel):
    """Base of all sections: immutable, strictly typed; unknown keys are errors.

    ``effect`` applies to keys without an annotation of another :class:`Effect`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    effect: ClassVar[Effect] = Effect.RESTART


def effect_of(field: FieldInfo, section: Section | type[Section]) -> Effect:
    """Return the time at which a changed value of a field applies."""
    own = (mark for mark in field.metadata if isinstance(mark, Effect))
    return next(own, section.effect)
