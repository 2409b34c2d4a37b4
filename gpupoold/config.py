"""One TOML file becomes frozen settings, one object per component.

A component is handed its own section only. Sizes and durations are kept in
bytes and seconds whatever the file wrote; every problem in the file is a
``ConfigError`` that names the file, the key and what to write instead.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from gpupoold.admin.paths import SYSTEM_RUNTIME_DIR, default_socket_path
from gpupoold.config_access import AccessSettings
from gpupoold.config_errors import config_error
from gpupoold.config_sections import (
    CUDA_RESERVE_BYTES,
    DeviceSettings,
    HistorySettings,
    LimitSettings,
    LogSettings,
    MemorySettings,
    PathSettings,
    SchedulingSettings,
    SecuritySettings,
    ServerSettings,
)
from gpupoold.config_values import Section, as_tuple
from gpupoold.device_names import named_devices
from gpupoold.errors import ConfigError
from gpupoold.units import format_bytes

__all__ = [
    "CUDA_RESERVE_BYTES",
    "AccessSettings",
    "DeviceSettings",
    "LimitSettings",
    "MemorySettings",
    "ServerSettings",
    "Settings",
    "default_devices",
    "known_keys",
    "load_settings",
    "parse_settings",
]

CONFIG_VARIABLE = "GPUPOOL_CONFIG"
SYSTEM_CONFIG = Path("/etc/gpupool/gpupool.toml")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


class Settings(Section):
    """Everything the file can say. ``devices`` is never empty."""

    paths: PathSettings
    devices: Annotated[tuple[DeviceSettings, ...], BeforeValidator(as_tuple)] = Field(
        alias="device"
    )
    server: ServerSettings = ServerSettings()
    memory: MemorySettings = MemorySettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    access: AccessSettings = AccessSettings()
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
