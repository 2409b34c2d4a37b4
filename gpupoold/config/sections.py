"""The sections of the configuration, one class each. Defaults are here, as the file spells them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from gpupoold.config.device_names import check_gpu
from gpupoold.config.values import (
    AbsolutePath,
    Count,
    Duration,
    Effect,
    HostNames,
    PositiveSize,
    Section,
    Size,
    as_tuple,
)
from gpupoold.units import format_bytes

GIB = 2**30
EMULATED_DEVICE_BYTES = 2 * GIB
CUDA_RESERVE_BYTES = 3 * GIB
CUDA_GRANULARITY_BYTES = 2 * 2**20
HOST_PAGE_BYTES = 4096

RoleName = Literal["auto", "prefill", "decode", "mixed"]


def _roles(value: object) -> object:
    known = get_args(RoleName)
    names = tuple(value) if isinstance(value, list | tuple) else value
    if names == "auto" or (isinstance(names, tuple) and all(one in known for one in names)):
        return names
    shown = ", ".join(f'"{name}"' for name in known)
    raise ValueError(f'{value!r}: write "auto", or a list with one of {shown} for each device')


class ServerSettings(Section):
    """``[server]``: the public HTTP address. Port 0 takes a free one.

    With the PEM files of a certificate and its key it speaks HTTPS. ``frontends`` processes
    share it.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: Annotated[PositiveSize, Effect.LIVE] = Field(
        default=10_000_000, alias="max_body"
    )
    frontends: int = Field(default=2, ge=1, le=64)
    tls_cert: AbsolutePath | None = None
    tls_key: AbsolutePath | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        return self


class PathSettings(Section):
    """``[paths]``: all absolute. Defaults depend on the user, see ``load_settings``.

    ``workloads_dir`` is for ``gpupool simulate``; the daemon does not read it.
    """

    state_dir: AbsolutePath
    runtime_dir: AbsolutePath
    model_dirs: Annotated[tuple[AbsolutePath, ...], BeforeValidator(as_tuple), Effect.LIVE]
    log_dir: AbsolutePath
    download_dir: AbsolutePath
    workloads_dir: Annotated[AbsolutePath | None, Effect.LIVE] = None


class DeviceSettings(Section):
    """One ``[[device]]``.

    ``memory_bytes`` is the size of an emulated device's memory; on others it is a
    cap, None for all of it. ``index`` is the CUDA ordinal, None on others. ``gpu``
    is what a ``sim`` device simulates, None on others. ``page_bytes`` None lets the
    worker choose.
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

    A model whose weights have been brought in ``self_check_interval`` times has to give the answer
    that it gave when it was loaded; 0: never.
    """

    model_cache_bytes: Annotated[Size, Effect.LIVE] = Field(default=8 * GIB, alias="model_cache")
    snapshot_files_bytes: Annotated[Size, Effect.LIVE] = Field(default=0, alias="snapshot_files")
    kv_host_bytes: Size = Field(default=2 * GIB, alias="kv_host")
    reserve_bytes: Size | None = Field(default=None, alias="reserve")
    self_check_interval: Annotated[int, Effect.LIVE] = Field(default=1000, ge=0)

    def reserve_for(self, kind: str) -> int:
        """Bytes to leave free on a device of this kind."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return CUDA_RESERVE_BYTES if kind == "cuda" else 0


class SchedulingSettings(Section):
    """``[scheduling]``: ``quota_max_s`` is the longest turn of a model while others wait.

    ``roles``: of the devices in their order; ``auto`` ones are the policy's to choose.
    """

    effect: ClassVar[Effect] = Effect.LIVE

    policy: Annotated[
        Literal[
            "gpupool",
            "aegaeon",
            "request-level",
            "request-level-4",
            "static",
            "prefill-first",
            "decode-first",
        ],
        Effect.RESTART,
    ] = "gpupool"
    roles: Annotated[Literal["auto"] | tuple[RoleName, ...], BeforeValidator(_roles)] = "auto"
    quota_max_s: Duration = Field(default=4.0, alias="quota_max")


class SecuritySettings(Section):
    """``[security]``: what checkpoints, clients and the environment are trusted with.

    The first two let a checkpoint run its own code in a worker. ``media_hosts`` are the hosts
    that snapshots, audio and video may be fetched from. ``vllm_variables`` are names of environment
    variables that workers and frontends get beside those of ``KNOWN_VARIABLES``.
    """

    effect: ClassVar[Effect] = Effect.LOADS

    allow_remote_code: bool = False
    allow_pickle: bool = False
    media_hosts: HostNames = ()
    vllm_variables: Annotated[
        tuple[Annotated[str, Field(pattern=r"^VLLM_[A-Z0-9_]+$")], ...],
        BeforeValidator(as_tuple),
        Effect.RESTART,
    ] = ()


class HistorySettings(Section):
    """``[history]``: rows kept per table; the oldest go first."""

    effect: ClassVar[Effect] = Effect.LIVE

    max_requests: Count = 100_000
    max_switches: Count = 100_000
    max_events: Count = 10_000
    max_minutes: Count = 200_000


class LimitSettings(Section):
    """``[limits]``: bounds of queues and of patience.

    ``drop_late``: requests whose first token cannot come in time are not served.
    ``max_bytes_in_flight``: of requests that are read, wait or run; half of it for one API key.
    """

    effect: ClassVar[Effect] = Effect.LIVE

    max_live_requests_per_model: Count = 1024
    max_live_requests: Count = 4096
    max_bytes_in_flight: PositiveSize = 256_000_000
    drop_late: bool = False
    load_timeout_s: Duration = Field(default=600.0, alias="load_timeout")
    drain_timeout_s: Duration = Field(default=600.0, alias="drain_timeout")
    stop_grace_s: Duration = Field(default=10.0, alias="stop_grace")
    hang_timeout_s: Duration = Field(default=60.0, alias="hang_timeout")
    token_timeout_s: Duration = Field(default=600.0, alias="token_timeout")


class LogSettings(Section):
    """``[log]``."""

    effect: ClassVar[Effect] = Effect.LIVE

    level: Literal["debug", "info", "warning", "error"] = "info"
