"""The configuration: a TOML file is parsed into frozen settings with an object per section.

A component gets only the sections that concern the component. Sizes are stored in bytes, durations
in seconds. A problem in the file raises a ``ConfigError`` with the file, the key and a remedy.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from gpupoold.api.paths import SYSTEM_RUNTIME_DIR, default_socket_path
from gpupoold.config.device_names import named_devices, numbered
from gpupoold.config.sections import (
    AccessSettings,
    BatchSettings,
    DeviceSettings,
    HistorySettings,
    IdleSettings,
    LimitSettings,
    LogSettings,
    MemorySettings,
    PathSettings,
    SchedulingSettings,
    SecuritySettings,
    ServerSettings,
    SimulatedHostSettings,
    TracesSettings,
)
from gpupoold.config.values import Section, as_tuple
from gpupoold.errors import ConfigError
from gpupoold.files import read_bounded
from gpupoold.units import format_bytes, plain_problem

CONFIG_VARIABLE = "GPUPOOL_CONFIG"
SYSTEM_CONFIG = Path("/etc/gpupool/gpupool.toml")
MAX_FILE_BYTES = 1 << 20
SERVICE_STATE_DIR = Path("/var/lib/gpupool")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


class Settings(Section):
    """All settings; ``devices`` is never empty."""

    paths: PathSettings
    devices: Annotated[tuple[DeviceSettings, ...], BeforeValidator(as_tuple)] = Field(
        alias="device"
    )
    server: ServerSettings = ServerSettings()
    memory: MemorySettings = MemorySettings()
    simulated_host: SimulatedHostSettings = SimulatedHostSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    access: AccessSettings = AccessSettings()
    security: SecuritySettings = SecuritySettings()
    history: HistorySettings = HistorySettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    traces: TracesSettings = TracesSettings()
    batches: BatchSettings = BatchSettings()
    idle: IdleSettings = IdleSettings()

    @property
    def kv_folder(self) -> Path:
        """The folder of the files with KV of ended requests, see ``memory.kv_files``."""
        return self.paths.state_dir / "kv"

    @field_validator("devices")
    @classmethod
    def _number_cuda(cls, devices: tuple[DeviceSettings, ...]) -> tuple[DeviceSettings, ...]:
        """Give each CUDA device without GPUs the lowest free index.

        Single GPUs may be shared by devices that state their memory.
        """
        if not devices:
            raise ValueError("an empty list; without [[device]] all GPUs of the machine are used")
        cuda = [device for device in devices if device.kind == "cuda"]
        has_memory = [device.memory_bytes is not None for device in cuda]
        free = iter(numbered([device.gpus or None for device in cuda], has_memory))

        def numbered_device(device: DeviceSettings) -> DeviceSettings:
            if device.kind != "cuda" or device.num_gpus > 1:
                return device
            index = device.gpus[0] if device.gpus else next(free)
            return device.model_copy(update={"index": index, "gpus_as_written": None})

        return tuple(numbered_device(device) for device in devices)

    @model_validator(mode="after")
    def _a_role_for_each_device(self) -> Self:
        roles = self.scheduling.roles
        if roles != "auto" and len(roles) != len(self.devices):
            raise _at_key(
                "scheduling.roles",
                f"has {len(roles)} entries for {len(self.devices)} devices; "
                'write a role for each device, or "auto" for all',
            )
        if set(roles) in ({"prefill"}, {"decode"}):
            raise _at_key(
                "scheduling.roles",
                "needs devices for prompts and for answers: prefill and decode, or mixed",
            )
        return self

    @model_validator(mode="after")
    def _reserve_leaves_memory(self) -> Self:
        reserve = self.memory.reserve_or_auto or 0
        for device in self.devices:
            if device.memory_bytes is not None and reserve >= device.memory_bytes:
                raise _at_key(
                    "memory.reserve",
                    f"{format_bytes(reserve)} leaves no memory of a device of "
                    f"{format_bytes(device.memory_bytes)}; lower memory.reserve or raise "
                    "device.memory",
                )
        return self

    @model_validator(mode="after")
    def _only_simulated_devices_have_a_simulated_host(self) -> Self:
        if self.simulated_host.memory_bytes is None:
            return self
        if any(device.kind != "sim" for device in self.devices):
            raise _at_key(
                "simulated_host.memory",
                'needs devices of kind = "sim" only, because other devices take the memory of '
                "the machine",
            )
        return self


class RunningSettings(Settings):
    """The settings of a running daemon; a reload of the configuration replaces sections.

    Users of the object read values at each use, or are called after a change.
    """

    model_config = ConfigDict(frozen=False)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return a replaceable copy of ``settings``."""
        return cls.model_construct(**_fields(settings))

    def take(self, settings: Settings) -> None:
        for name, section in _fields(settings).items():
            setattr(self, name, section)


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in type(settings).model_fields}


def _at_key(key: str, message: str) -> PydanticCustomError:
    """Return the error of a problem between sections, to be reported for ``key``."""
    return PydanticCustomError("at_key", "{message}", {"key": key, "message": message})


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: place, description, and a remedy, which may be empty.

    ``where`` has the names of section and key, and indexes of lists. ``line`` counts from 1; None
    for a problem without a line.
    """

    where: tuple[int | str, ...]
    what: str
    hint: str = ""
    line: int | None = None

    @property
    def key(self) -> str:
        """Dotted, as in ``device[0].memory``; empty for the file as a whole."""
        return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.where).lstrip(".")

    @property
    def in_full(self) -> str:
        """The problem with its line and remedy."""
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{self} ({self.hint})" if self.hint else f"{place}{self}"

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" if self.where else self.what


def place_of(key: str) -> tuple[int | str, ...]:
    """Return the parts of a dotted key, the reverse of ``Problem.key``."""
    parts = re.split(r"\.|(?=\[)", key)
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def chosen_path() -> Path | None:
    """Return ``$GPUPOOL_CONFIG``, else the system's configuration file if present, else None."""
    if chosen := os.environ.get(CONFIG_VARIABLE):
        return Path(chosen)
    # os.path.exists, because Path.exists raises PermissionError if the folder is not accessible.
    return SYSTEM_CONFIG if os.path.exists(SYSTEM_CONFIG) else None


def parse_settings(raw: Mapping[str, Any], origin: str) -> Settings:
    """Check parsed TOML and fill in defaults; errors name ``origin``.

    Raises ConfigError: the message has the first wrong key and the number of further errors.
    """
    settings, problems = examine(raw)
    if settings is None:
        first, *others = problems
        more = f"{len(others)} more {'problem' if len(others) == 1 else 'problems'} in this file"
        hints = filter(None, [first.hint, more if others else ""])
        raise ConfigError(f"{origin}: {first}", "; ".join(hints))
    return settings


def examine(raw: Mapping[str, Any]) -> tuple[Settings | None, list[Problem]]:
    """Return settings with defaults filled in, or all problems."""
    problems: list[Problem] = []
    try:
        data = with_device_tables(raw)
    except ValueError as error:
        problems = [Problem(("devices",), str(error))]
        data = {key: value for key, value in raw.items() if key not in ("devices", "device")}
    paths = data.get("paths", {})
    if isinstance(paths, dict):
        data["paths"] = _with_default_paths(paths)
    data.setdefault("device", default_devices())
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # Unknown keys first, because a misspelt key often explains a missing key.
        found.sort(key=lambda details: details["type"] != "extra_forbidden")
        problems += [_problem(error) for error in (*found, *_covered(data, found))]
    return (None, problems) if problems else (settings, [])


def with_device_tables(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of parsed TOML with ``device`` tables for ``devices``.

    Raises ValueError: ``devices`` is malformed, or the file has both forms.
    """
    data = dict(raw)
    if "devices" in data:
        data["device"] = named_devices(data.pop("devices"), "device" in data)
    return data


def _covered(data: Mapping[str, Any], found: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return problems between sections; pydantic skips these checks if a section is wrong.

    Empty if devices or memory are wrong, because further problems would be misleading.
    """
    places = [problem["loc"] for problem in found if problem["loc"]]
    if any(place[0] in ("device", "memory") for place in places) or len(places) < len(found):
        return []
    try:
        Settings.model_validate(without(data, places))
    except ValidationError as error:
        return [found for found in error.errors(include_url=False) if found["type"] == "at_key"]
    return []


def without(data: Mapping[str, Any], places: Iterable[Sequence[int | str]]) -> dict[str, Any]:
    """Return a copy of parsed TOML without the keys, or whole sections, at ``places``."""
    rest = copy.deepcopy(dict(data))
    for section, *names in filter(None, places):
        inner = rest.get(str(section))
        if names and isinstance(inner, dict):
            inner.pop(names[0], None)
        else:
            rest.pop(str(section), None)
    return rest


def default_devices() -> list[dict[str, object]]:
    """Return a CUDA device per visible NVIDIA GPU; without GPUs, an emulated device."""
    try:
        num_gpus = len(list(NVIDIA_GPUS.iterdir()))
    except OSError:
        num_gpus = 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA reads the entries up to the first invalid entry
        entries = takewhile(lambda entry: entry.strip() not in ("", "-1"), visible.split(","))
        num_gpus = min(num_gpus, len(list(entries)))
    return [{"kind": "cuda", "index": index} for index in range(num_gpus)] or [{"kind": "emulated"}]


def _with_default_paths(paths: dict[str, Any]) -> dict[str, Any]:
    is_root = os.geteuid() == 0
    filled = {
        "state_dir": str(_default_state_dir(is_root)),
        "runtime_dir": str(_default_runtime_dir(is_root)),
        "model_dirs": ["/var/lib/gpupool/models", "~/.local/share/gpupool/models"],
    } | paths
    state_dir = filled["state_dir"]
    if not isinstance(state_dir, str) or not state_dir.startswith(("/", "~/")):
        state_dir = "/"  # the check of state_dir reports the error; avoids two further errors
    return {"log_dir": f"{state_dir}/logs", "download_dir": f"{state_dir}/models"} | filled


def _default_state_dir(is_root: bool) -> Path:
    # The home of the service's user, who may run commands without the unit's variables.
    if is_root or Path.home() == SERVICE_STATE_DIR:
        return SERVICE_STATE_DIR
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "gpupool"


def _default_runtime_dir(is_root: bool) -> Path:
    if is_root and not os.environ.get("GPUPOOL_RUNTIME_DIR"):
        return SYSTEM_RUNTIME_DIR
    return default_socket_path().parent


def read_text(path: Path) -> str:
    """Read a configuration file; ``/dev/null`` is an empty file.

    Raises ConfigError: the file is missing, no regular file, too large, or cannot be read.
    """
    if path == Path(os.devnull):
        return ""
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}",
            f"give another file with --config or ${CONFIG_VARIABLE}",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def sections() -> dict[str, type[Section]]:
    """Return the sections by name in the file; ``device`` is the section of each device."""
    kinds: dict[str, type[Section]] = {"device": DeviceSettings}
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            kinds[name] = field.annotation
    return kinds


def known_keys() -> dict[str, tuple[str, ...]]:
    return {
        section: tuple(field.alias or name for name, field in kind.model_fields.items())
        for section, kind in sections().items()
    }


def _problem(problem: ErrorDetails) -> Problem:
    parts = problem["loc"]
    match problem["type"]:
        case "extra_forbidden":
            return Problem(parts, "unknown key", _nearest(parts))
        case "missing":
            return Problem(parts, "is missing")
        case "model_type":
            name = str(parts[0])
            header = f"[[{name}]]" if name == "device" else f"[{name}]"
            return Problem(parts, "must be a table", f"write the keys under {header}")
        case "value_error" if parts == ("device",) and isinstance(problem["input"], dict):
            return Problem(parts, "must be a list of tables", "write [[device]], with two brackets")
        case "at_key":
            return Problem(place_of(problem["ctx"]["key"]), problem["msg"])
    message = plain_problem(problem["msg"])
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
    return Problem(parts, message + got)


def _nearest(parts: tuple[int | str, ...]) -> str:
    """Return a hint: the nearest known key, or the section of the key."""
    name, keys = str(parts[-1]), known_keys()
    known = list(keys) if len(parts) == 1 else list(keys.get(str(parts[0]), ()))
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    for section, names in keys.items():
        if name in names:
            return f"{name!r} belongs in [{section}]"
    return f"known here: {', '.join(known)}"
