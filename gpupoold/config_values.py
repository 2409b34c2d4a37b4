"""How values are written in the configuration: sizes, durations, paths, lists; and sections."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gpupoold.units import parse_duration_s, parse_size_bytes


def _size(value: object) -> object:
    if isinstance(value, str):
        return parse_size_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError('write a size such as "24GiB", or a whole number of bytes')


def _duration(value: object) -> object:
    if isinstance(value, str):
        return parse_duration_s(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError('write a duration such as "500ms" or "4s", or a number of seconds')


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
        raise ValueError(f"{value!r} is relative; start it with / or ~")
    return path


def as_tuple(value: object) -> object:
    """TOML's lists are this program's tuples.

    Raises:
        ValueError: it is no list.
    """
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError("write a list")


Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
PositiveSize = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0)]
AbsolutePath = Annotated[Path, BeforeValidator(_path)]
Count = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: immutable, strictly typed, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
