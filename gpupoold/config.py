"""One TOML file becomes frozen settings, one object per component.

A component is handed its own section only. Sizes and durations are kept in
bytes and seconds whatever the file wrote; every problem in the file is a
``ConfigError`` that names the file, the key and what to write instead.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from gpupoold.admin.paths import SYSTEM_RUNTIME_DIR, default_socket_path
from gpupoold.config_errors import config_error
from gpupoold.device_names import check_gpu, named_devices
from gpupoold.errors import ConfigError
from gpupoold.units import format_bytes, parse_duration_s, parse_size_bytes

CONFIG_VARIABLE = "GPUPOOL_CONFIG"
SYSTEM_CONFIG = Path("/etc/gpupool/gpupool.toml")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

GIB = 2**30
EMULATED_DEVICE_BYTES = 2 * GIB
CUDA_RESERVE_BYTES = 3 * GIB
CUDA_GRANULARITY_BYTES = 2 * 2**20
HOST_PAGE_BYTES = 4096


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


def _list(value: object) -> object:
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


class ServerSettings(Section):
    """``[server]``: the public HTTP address. Port 0 takes a free one."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: PositiveSize = Field(default=10_000_000, alias="max_body")


class PathSettings(Section):
    """``[paths]``: all absolute. Defaults depend on the user, see ``load_settings``.

    ``workloads_dir`` is for ``gpupool simulate``; the daemon does not read it.
    """

    state_dir: AbsolutePath
    runtime_dir: AbsolutePath
    model_dirs: Annotated[tuple[AbsolutePath, ...], BeforeValidator(_list)]
    log_dir: AbsolutePath
    download_dir: AbsolutePath
    workloads_dir: AbsolutePath | None = None


class DeviceSettings(Section):
    """One ``[[device]]``.

    ``memory_bytes`` is the size of an emulated device's memory; on others it is a
    cap, None for all of it. ``index`` is the CUDA ordinal, None on others. ``gpu``
    is what a ``sim`` device simulates, None on others. ``page_bytes`` None lets the
    instance choose.
    """

    kind: Literal["emulated", "cuda", "sim"]
    memory_bytes: PositiveSize | None = Field(default=None, alias="memory")
    index: int | None = Field(default=None, ge=0)
    gpu: str | None = None
    page_bytes: PositiveSize | None = None

    @model_validator(mode="before")
    @classmethod
    def _emulated_size(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("kind") == "emulated":
            return {"memory": EMULATED_DEVICE_BYTES} | data
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind != "cuda" and self.index is not None:
            raise ValueError('index is for kind = "cuda" only')
        check_gpu(self.kind, self.gpu)
        if self.kind == "sim" and self.page_bytes is not None:
            raise ValueError('page_bytes is not for kind = "sim": it has no pages')
        step = CUDA_GRANULARITY_BYTES if self.kind == "cuda" else HOST_PAGE_BYTES
        if self.page_bytes is not None and self.page_bytes % step:
            raise ValueError(
                f"page_bytes must be a multiple of {format_bytes(step)} on a {self.kind} device"
            )
        return self


class MemorySettings(Section):
    """``[memory]``: host and disk budgets, and what stays free on a device for activations.

    A model whose weights have been brought in ``canary_interval`` times has to give the answer
    that it gave when it was loaded; 0: never.
    """

    model_cache_bytes: Size = Field(default=8 * GIB, alias="model_cache")
    image_files_bytes: Size = Field(default=0, alias="image_files")
    kv_host_bytes: Size = Field(default=2 * GIB, alias="kv_host")
    reserve_bytes: Size | None = Field(default=None, alias="reserve")
    canary_interval: int = Field(default=1000, ge=0)

    def reserve_for(self, kind: str) -> int:
        """Bytes to leave free on a device of this kind."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return CUDA_RESERVE_BYTES if kind == "cuda" else 0


class SchedulingSettings(Section):
    """``[scheduling]``: ``quota_max_s`` is the longest turn of a model while others wait.

    ``roles``: of the devices in their order; ``auto`` ones are the policy's to choose.
    """

    policy: Literal[
        "gpupool",
        "aegaeon",
        "request-level",
        "request-level-4",
        "static",
        "prefill-first",
        "decode-first",
    ] = "gpupool"
    roles: (
        Literal["auto"]
        | Annotated[
            tuple[Literal["auto", "prefill", "decode", "mixed"], ...], BeforeValidator(_list)
        ]
    ) = "auto"
    quota_max_s: Duration = Field(default=4.0, alias="quota_max")


class SecuritySettings(Section):
    """``[security]``: both let a checkpoint run its own code in an instance."""

    allow_remote_code: bool = False
    allow_pickle: bool = False


class HistorySettings(Section):
    """``[history]``: rows kept per table; the oldest go first."""

    max_requests: Count = 100_000
    max_switches: Count = 100_000
    max_events: Count = 10_000
    max_minutes: Count = 200_000


class LimitSettings(Section):
    """``[limits]``: bounds of queues and of patience.

    ``drop_late``: requests whose first token cannot come in time are not served.
    """

    max_live_requests_per_model: Count = 1024
    max_live_requests: Count = 4096
    drop_late: bool = False
    load_timeout_s: Duration = Field(default=600.0, alias="load_timeout")
    drain_timeout_s: Duration = Field(default=600.0, alias="drain_timeout")
    stop_grace_s: Duration = Field(default=10.0, alias="stop_grace")
    hang_timeout_s: Duration = Field(default=60.0, alias="hang_timeout")
    token_timeout_s: Duration = Field(default=600.0, alias="token_timeout")


class LogSettings(Section):
    """``[log]``."""

    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(Section):
    """Everything the file can say. ``devices`` is never empty."""

    paths: PathSettings
    devices: Annotated[tuple[DeviceSettings, ...], BeforeValidator(_list)] = Field(alias="device")
    server: ServerSettings = ServerSettings()
    memory: MemorySettings = MemorySettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    security: SecuritySettings = SecuritySettings()
    history: HistorySettings = HistorySettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()

    @field_validator("devices")
    @classmethod
    def _number_cuda(cls, devices: tuple[DeviceSettings, ...]) -> tuple[DeviceSettings, ...]:
        """Every CUDA device without an index gets the lowest that is free."""
        if not devices:
            raise ValueError("an empty list; leave [[device]] out to have the GPUs found")
        named = [device.index for device in devices if device.index is not None]
        if len(named) != len(set(named)):
            raise ValueError("two devices have the same index")
        free = (index for index in range(len(devices) + len(named)) if index not in named)
        return tuple(
            device.model_copy(update={"index": next(free)})
            if device.kind == "cuda" and device.index is None
            else device
            for device in devices
        )

    @model_validator(mode="after")
    def _a_role_for_each_device(self) -> Self:
        roles = self.scheduling.roles
        if roles != "auto" and len(roles) != len(self.devices):
            raise ValueError(
                f"scheduling.roles has {len(roles)} entries for {len(self.devices)} devices; "
                'write one for each, or "auto" for all'
            )
        if set(roles) in ({"prefill"}, {"decode"}):
            raise ValueError(
                "scheduling.roles needs devices for prompts and for answers: "
                "prefill and decode, or mixed"
            )
        return self

    @model_validator(mode="after")
    def _reserve_leaves_memory(self) -> Self:
        for device in self.devices:
            reserve = self.memory.reserve_for(device.kind)
            if device.memory_bytes is not None and reserve >= device.memory_bytes:
                raise ValueError(
                    f"memory.reserve ({format_bytes(reserve)}) leaves nothing of a device of "
                    f"{format_bytes(device.memory_bytes)}; lower it or raise device.memory"
                )
        return self


def load_settings(path: Path | None = None) -> Settings:
    """Settings from ``path``, else ``$GPUPOOL_CONFIG``, else the system's file, else defaults.

    Raises:
        ConfigError: the file is missing, is not TOML, or says something wrong.
    """
    if path is None:
        path = _default_config_path()
    if path is None:
        return parse_settings({}, "defaults")
    return parse_settings(_read_toml(path), str(path))


def _default_config_path() -> Path | None:
    if chosen := os.environ.get(CONFIG_VARIABLE):
        return Path(chosen)
    # os.path.exists, because Path.exists raises where the folder may not be searched.
    return SYSTEM_CONFIG if os.path.exists(SYSTEM_CONFIG) else None


def parse_settings(raw: Mapping[str, Any], origin: str) -> Settings:
    """Check parsed TOML and fill in what it leaves out; ``origin`` is named in errors.

    Raises:
        ConfigError: naming the first wrong key, and how many more there are.
    """
    data = dict(raw)
    paths = data.get("paths", {})
    if isinstance(paths, dict):
        data["paths"] = _with_default_paths(paths)
    try:
        if "devices" in data:
            data["device"] = named_devices(data.pop("devices"), "device" in data)
    except ValueError as error:
        raise ConfigError(f"{origin}: devices: {error}") from None
    data.setdefault("device", default_devices())
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise config_error(origin, error.errors(include_url=False), known_keys()) from None


def default_devices() -> list[dict[str, object]]:
    """A CUDA device per visible NVIDIA GPU, or one emulated device without any."""
    try:
        num_gpus = len(list(NVIDIA_GPUS.iterdir()))
    except OSError:
        num_gpus = 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        num_gpus = min(num_gpus, _num_visible(visible))
    return [{"kind": "cuda", "index": index} for index in range(num_gpus)] or [{"kind": "emulated"}]


def _num_visible(variable: str) -> int:
    """CUDA reads ``CUDA_VISIBLE_DEVICES`` up to the first entry that names no device."""
    count = 0
    for entry in variable.split(","):
        if entry.strip() in ("", "-1"):
            break
        count += 1
    return count


def _with_default_paths(paths: dict[str, Any]) -> dict[str, Any]:
    is_root = os.geteuid() == 0
    filled = {
        "state_dir": str(_default_state_dir(is_root)),
        "runtime_dir": str(_default_runtime_dir(is_root)),
        "model_dirs": ["/var/lib/gpupool/models", "~/.local/share/gpupool/models"],
    } | paths
    state_dir = filled["state_dir"]
    if not isinstance(state_dir, str) or not state_dir.startswith(("/", "~/")):
        state_dir = "/"  # state_dir is refused below; these two need not be refused as well
    return {"log_dir": f"{state_dir}/logs", "download_dir": f"{state_dir}/models"} | filled


def _default_state_dir(is_root: bool) -> Path:
    if is_root:
        return Path("/var/lib/gpupool")
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "gpupool"


def _default_runtime_dir(is_root: bool) -> Path:
    if is_root and not os.environ.get("GPUPOOL_RUNTIME_DIR"):
        return SYSTEM_RUNTIME_DIR
    return default_socket_path().parent


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}",
            f"give another file with --config or ${CONFIG_VARIABLE}",
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def known_keys() -> dict[str, tuple[str, ...]]:
    """Section → its keys, as the file spells them."""
    kinds: dict[str, type[Section]] = {"device": DeviceSettings}
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            kinds[name] = field.annotation
    return {
        section: tuple(field.alias or name for name, field in kind.model_fields.items())
        for section, kind in kinds.items()
    }
