"""The TOML file with the models of a plan: a ``[[model]]`` table per model or kind of model."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpupoold.domain import DEFAULT_TBT_S, DEFAULT_TTFT_S, Targets
from gpupoold.errors import UsageError
from gpupoold.latency.shape import DataError, builtin_shape
from gpupoold.sim.planner.models import Checkpoint, PlannedModel, read_checkpoint
from gpupoold.units import parse_duration_s, parse_size_bytes

T = TypeVar("T")
_KEYS = ("name", "shape", "path", "ttft", "tbt", "rps", "count", "weights", "max_len")
_MAX_COUNT = 10_000


def read_models(path: Path) -> tuple[PlannedModel, ...]:
    """Return the models of the file, in order.

    ``count`` equal models are named ``name-0``, ``name-1``, ...; a relative ``path`` is resolved
    against the file's folder.

    Raises:
        UsageError: the message names file, entry and key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    unknown = sorted(content.keys() - {"model"})
    entries = content.get("model")
    if unknown or not isinstance(entries, list) or not entries:
        problem = f"unknown key {unknown[0]!r}" if unknown else "names no models"
        raise UsageError(f"{path}: {problem}", "write one [[model]] table per model")
    return tuple(
        model
        for number, values in enumerate(entries, start=1)
        for model in _ModelEntry(path, number, values).models()
    )


@dataclass(frozen=True, slots=True)
class _ModelEntry:
    """A ``[[model]]`` table; ``number`` counts from 1."""

    file: Path
    number: int
    values: Any

    def models(self) -> Iterator[PlannedModel]:
        """Yield the model, or ``count`` models."""
        self._check_keys()
        name = self._read("name", _text, None)
        if name is None:
            raise self._error("name", "is missing")
        shape, weight_bytes = self._checkpoint()
        weight_bytes = self._read("weights", _size_bytes, weight_bytes)
        targets = Targets(
            self._read("ttft", _seconds, DEFAULT_TTFT_S), self._read("tbt", _seconds, DEFAULT_TBT_S)
        )
        count = self._read("count", _count, None)
        if count is not None and count > _MAX_COUNT:
            raise self._error("count", f"at most {_MAX_COUNT}")
        names = [name] if count is None else [f"{name}-{index}" for index in range(count)]
        for one in names:
            yield PlannedModel(
                one,
                targets,
                weight_bytes,
                shape.kv_bytes_per_token,
                shape,
                max_len=self._read("max_len", _count, None),
                rps=self._read("rps", _rate, None),
            )

    def _check_keys(self) -> None:
        if not isinstance(self.values, Mapping):
            raise UsageError(f"{self.file}: model {self.number}: must be a [[model]] table")
        unknown = sorted(self.values.keys() - set(_KEYS))
        if unknown:
            raise UsageError(
                f"{self.file}: model {self.number}: unknown key {unknown[0]!r}",
                f"known: {', '.join(_KEYS)}",
            )
        if ("shape" in self.values) == ("path" in self.values):
            raise UsageError(
                f"{self.file}: model {self.number}: needs either shape or path",
                'such as shape = "Qwen2.5-7B", or path = "/models/qwen"',
            )

    def _checkpoint(self) -> Checkpoint:
        known = self._read("shape", _text, None)
        if known is not None:
            try:
                shape = builtin_shape(known)
            except DataError as error:
                raise self._error("shape", str(error)) from error
            return Checkpoint(shape, shape.weight_bytes)
        folder = Path(self._read("path", _text, ".")).expanduser()
        return read_checkpoint(self.file.parent / folder)

    def _read(self, key: str, convert: Callable[[Any], T], default: T) -> T:
        if key not in self.values:
            return default
        try:
            return convert(self.values[key])
        except ValueError as error:
            raise self._error(key, str(error)) from error

    def _error(self, key: str, problem: str) -> UsageError:
        return UsageError(f"{self.file}: model {self.number}: {key}: {problem}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text in quotes")
    return value


def _seconds(value: Any) -> float:
    seconds = parse_duration_s(value) if isinstance(value, str) else _number(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} must be more than zero and finite")
    return seconds


def _size_bytes(value: Any) -> int:
    size = parse_size_bytes(value) if isinstance(value, str) else _count(value)
    if size < 1:
        raise ValueError(f"{value!r} must be more than zero")
    return size


def _rate(value: Any) -> float:
    rate = _number(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value!r} requests/s: must be above 0")
    return rate


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number above 0")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
