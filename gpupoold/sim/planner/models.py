"""A plan's models, from a file, a checkpoint, or a daemon's registry."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.files import config_of_steps
from gpupoold.checkpoints.survey import estimate_weight_bytes
from gpupoold.domain import DEFAULT_TBT_S, DEFAULT_TTFT_S, Targets
from gpupoold.errors import Refused, UsageError
from gpupoold.latency.models import LatencyModel, StoredLatency
from gpupoold.latency.profiles import latency_for
from gpupoold.latency.shape import (
    MAX_GROUP_GPUS,
    DataError,
    LatencyError,
    ModelShape,
    builtin_shape,
    from_hf_config,
    hardware,
    parse_group_name,
)
from gpupoold.sim.boxes import USABLE_SHARE, Box, SimModel
from gpupoold.units import parse_duration_s, parse_size_bytes

# Source of step times: a daemon's measurement on this kind of device, the packaged fit of the same
# dimensions and GPU, or the nearest packaged fit, scaled.
Basis = Literal["measured", "published", "scaled"]
_MAX_NAMED = 3

T = TypeVar("T")
_KEYS = ("name", "shape", "path", "family", "ttft", "tbt", "rps", "count", "weights", "max_len")
_MAX_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model before its placement on a device.

    ``shape`` is None for unknown dimensions, with the reason in ``shape_problem``; the model then
    needs ``measured`` step times. ``measured`` has a daemon's measurements on several kinds of
    device, the latest last, ``engine_bytes`` the memory of engines that a daemon measured on kinds
    of device. ``max_len`` is the longest prompt plus answer in tokens; ``rps`` is the
    rate in requests per second. A model that does not generate only prefills. Models of a
    ``family`` share engines, but not on groups of GPUs.
    """

    name: str
    targets: Targets
    weight_bytes: int
    kv_bytes_per_token: int
    shape: ModelShape | None = None
    shape_problem: str = ""
    measured: tuple[StoredLatency, ...] = ()
    max_len: int | None = None
    rps: float | None = None
    generates: bool = True
    family: str = ""
    engine_bytes: Mapping[str, int] = field(default_factory=dict)


class Placed(NamedTuple):
    """Models on a kind of device, and the source of each model's step times.

    On a box with unlike groups, ``by_degree`` has the models that groups of each size can run, and
    ``models`` has each model on the smallest such group.
    """

    models: dict[str, SimModel]
    basis: dict[str, Basis]
    by_degree: dict[int, dict[str, SimModel]]


def place(models: Sequence[PlannedModel], box: Box) -> Placed:
    """Place all models on devices of ``box``.

    Raises UsageError if models exceed a device, a name repeats, the GPUs of a group cannot share a
    model equally, the latency of a model on this GPU is unknown, or a group can run no model.
    """
    if not models:
        raise UsageError("no models to plan for")
    [(name, times)] = Counter(model.name for model in models).most_common(1)
    if times > 1:
        raise UsageError(
            f"model {name!r} is named {times} times", "give each model a different name"
        )
    _check_sizes(models, box)
    degrees = sorted(set(box.groups))
    found = {model.name: _on_degrees(model, box, degrees) for model in models}
    by_degree: dict[int, dict[str, SimModel]] = {}
    for name, on in found.items():
        for degree, (placed, _) in on.items():
            by_degree.setdefault(degree, {})[name] = placed
    for degree in degrees:
        if degree not in by_degree:
            place_on(models[0], box, degree)  # raises the reason
    least = {name: on[min(on)] for name, on in found.items()}
    return Placed(
        {name: model for name, (model, _) in least.items()},
        {name: basis for name, (_, basis) in least.items()},
        by_degree if len(degrees) > 1 else {},
    )


def place_on(model: PlannedModel, box: Box, degree: int) -> tuple[SimModel, Basis]:
    """Place a model on a group of ``degree`` GPUs of ``box``.

    Raises UsageError if the group cannot run the model.
    """
    kv_bytes, room = model.kv_bytes_per_token, box.bytes_of(degree)
    if model.weight_bytes >= room:
        raise UsageError(
            f"{model.name} weighs {_gb(model.weight_bytes)}, {degree} {box.gpu} hold {_gb(room)}"
        )
    if model.shape is not None:
        if problem := model.shape.why_undivided(degree):
            raise UsageError(
                f"{model.name}: {degree} GPUs cannot share the model equally: {problem}",
                "use groups of another size (--groups)",
            )
        kv_bytes = kv_bytes * model.shape.kv_bytes_on(degree) // model.shape.kv_bytes_per_token
    latency, basis = _latency(model, box, degree)
    placed = SimModel(
        model.name,
        model.targets,
        latency,
        model.weight_bytes,
        kv_bytes,
        model.generates,
        model.family if degree == 1 else "",
    )
    return placed, basis


def _on_degrees(
    model: PlannedModel, box: Box, degrees: Sequence[int]
) -> dict[int, tuple[SimModel, Basis]]:
    """Return the model on the groups that can run it; raises UsageError if there are none."""
    found: dict[int, tuple[SimModel, Basis]] = {}
    problems: list[UsageError] = []
    for degree in degrees:
        try:
            found[degree] = place_on(model, box, degree)
        except UsageError as error:
            problems.append(error)
    if not found:
        raise problems[-1]
    return found


class Checkpoint(NamedTuple):
    """Dimensions of a checkpoint and the bytes of its weights on a device."""

    shape: ModelShape
    weight_bytes: int


def read_checkpoint(folder: Path, dtype: str = "auto") -> Checkpoint:
    """Read ``config.json``, and the headers of the weights if present (for quantized weights).

    Raises UsageError; the message names the file and its error.
    """
    shape = read_shape(folder, dtype)
    try:
        if not any(folder.glob("*.safetensors")):
            return Checkpoint(shape, shape.weight_bytes)
        info = check_checkpoint(folder, allow_pickle=False, allow_remote_code=True)
        return Checkpoint(shape, estimate_weight_bytes(info, dtype))
    except Refused as error:
        raise UsageError(error.message, error.hint) from error


def read_family(folder: Path, *settings: object) -> str:
    """Return a text that fine-tunes of one model with equal ``settings`` have in common.

    Empty if ``config.json`` cannot be read.
    """
    try:
        return repr((config_of_steps(folder), *settings))
    except Refused:
        return ""


def read_shape(folder: Path, dtype: str = "auto") -> ModelShape:
    """Return the dimensions in a folder's ``config.json``.

    Raises UsageError if the file is missing, unreadable, or describes another kind of model.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        return from_hf_config(config, dtype=_served_dtype(config, dtype))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except LatencyError as error:
        raise UsageError(f"{folder}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from error


def _served_dtype(config: Mapping[str, Any], dtype: str) -> str | None:
    """Return the dtype an engine would choose; None is the checkpoint's own.

    With ``auto``, 32-bit checkpoints are served in 16 bits.
    """
    if dtype != "auto":
        return dtype
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return "bfloat16" if own.removeprefix("torch.") in ("float32", "float") else None


def _latency(model: PlannedModel, box: Box, degree: int) -> tuple[LatencyModel, Basis]:
    try:
        if (measured := measured_on(model, box, degree)) is not None:
            return measured, "measured"
        if model.shape is None:
            raise UsageError(
                f"{model.name}: step times on {box.gpu} need the model's dimensions: "
                f"{model.shape_problem}"
            )
        known = latency_for(box.gpu, model.shape, num_gpus=degree)
    except LatencyError as error:
        raise UsageError(f"{model.name}: {error}") from error
    return known, "scaled" if known.is_scaled else "published"


def measured_on(model: PlannedModel, box: Box, degree: int) -> LatencyModel | None:
    """Return what a daemon measured last on groups of ``degree`` GPUs of ``box``, None for nothing.

    Raises LatencyError if a stored profile has an unknown form.
    """
    fitting = [
        latency
        for latency in model.measured
        if parse_group_name(latency.device)[0] == degree and _is_gpu_of(box, latency.device)
    ]
    found = [latency for stored in fitting if (latency := stored.model()) is not None]
    return found[-1] if found else None


def measured_degrees(model: PlannedModel, box: Box) -> list[int]:
    """Return the sizes of groups of the GPUs of ``box`` on which a daemon measured the model."""
    degrees = sorted({parse_group_name(latency.device)[0] for latency in model.measured})
    return [degree for degree in degrees if measured_on(model, box, degree) is not None]


def measured_engines(models: Sequence[PlannedModel], box: Box) -> dict[str, int]:
    """Return the memory of each model's engine on a GPU of ``box``, as far as a daemon measured it.

    The largest that was measured, of the model or of its family.
    """
    largest: dict[str, int] = {}
    for model in models:
        for device, num_bytes in model.engine_bytes.items():
            if _is_gpu_of(box, device):
                per_gpu = num_bytes // parse_group_name(device)[0]
                key = model.family or model.name
                largest[key] = max(largest.get(key, 0), per_gpu)
    keys = {model.name: model.family or model.name for model in models}
    return {name: largest[key] for name, key in keys.items() if key in largest}


def _is_gpu_of(box: Box, device: str) -> bool:
    """Return whether a device, perhaps a group, consists of GPUs of the box's kind."""
    try:
        return hardware(parse_group_name(device)[1]) == hardware(box.gpu)
    except LatencyError:  # an emulated device, or a GPU without a profile
        return False


def _check_sizes(models: Sequence[PlannedModel], box: Box) -> None:
    room = box.device_bytes
    large = [model for model in models if model.weight_bytes >= room]
    if not large:
        return
    size = box.tensor_parallel_size
    device = f"one {box.gpu}" if size == 1 else f"{size} {box.gpu} together"
    listed = "; ".join(
        f"{model.name} weighs {_gb(model.weight_bytes)}, {_gb(model.weight_bytes - room)} too much"
        for model in large[:_MAX_NAMED]
    )
    if len(large) > _MAX_NAMED:
        listed += f"; and {len(large) - _MAX_NAMED} more"
    verb = "the model does" if len(large) == 1 else "these models do"
    most_gpus = min(MAX_GROUP_GPUS, sum(box.groups))
    can_group = size == 1 and all(m.weight_bytes < most_gpus * room for m in large)
    raise UsageError(
        f"{listed}: {device} can hold {_gb(room)} ({100 * USABLE_SHARE:.0f} % of the memory), "
        f"so {verb} not fit at all",
        "use groups of GPUs: --groups auto chooses, --groups 2x4 makes two groups of four"
        if can_group
        else "use larger GPUs or a quantized version, or leave these models out",
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def read_models(path: Path) -> tuple[PlannedModel, ...]:
    """Return the models of the file, in order.

    ``count`` equal models are named ``name-0``, ``name-1``, ...; a relative ``path`` is resolved
    against the file's folder. Raises UsageError; the message names file, entry and key.
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
    models = tuple(
        model
        for number, values in enumerate(entries, start=1)
        for model in _ModelEntry(path, number, values).models()
    )
    sizes: dict[str, tuple[ModelShape | None, int]] = {}
    for model in models:
        size = model.shape, model.weight_bytes
        if model.family and sizes.setdefault(model.family, size) != size:
            raise UsageError(f"{path}: the models of the family {model.family!r} differ in size")
    return models


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
                family=self._read("family", _text, ""),
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
