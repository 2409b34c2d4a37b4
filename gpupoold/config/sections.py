"""The sections of the configuration, a class for each section, with defaults."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gpupoold.config.device_names import check_gpu, check_group, group_value
from gpupoold.config.values import (
    AbsolutePath,
    AutoPositiveSize,
    AutoSize,
    Count,
    Duration,
    DurationOrZero,
    Effect,
    HostNames,
    LinkRate,
    PositiveSize,
    Section,
    Size,
    as_tuple,
    check_host,
    check_socket_folder,
)
from gpupoold.units import format_bytes

GIB = 2**30
EMULATED_DEVICE_BYTES = 2 * GIB
CUDA_RESERVE_BYTES = 3 * GIB
CUDA_GRANULARITY_BYTES = 2 * 2**20
HOST_PAGE_BYTES = 4096
# Of the reserve that is free at a worker's start; the rest is for activations and kernels.
_ENGINES_SHARE = 0.75
LEAST_KV_HOST_BYTES = 2 * GIB
LEAST_BYTES_IN_FLIGHT = 256_000_000

RoleName = Literal["auto", "prefill", "decode", "mixed"]


def _roles(value: object) -> object:
    known = get_args(RoleName)
    names = tuple(value) if isinstance(value, list | tuple) else value
    if names == "auto" or (isinstance(names, tuple) and all(one in known for one in names)):
        return names
    shown = ", ".join(f'"{name}"' for name in known)
    raise ValueError(f'{value!r}: write "auto", or a list with one role of {shown} for each device')


class ServerSettings(Section):
    """``[server]``: the public HTTP address; port 0 chooses a free port.

    With a certificate and a key (PEM files) the server uses HTTPS. ``frontends`` is the number of
    processes that share the address. ``wait_comments`` is the interval of the comments in streams
    that wait for a first token, 0 for none.
    """

    host: Annotated[str, AfterValidator(check_host)] = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: Annotated[PositiveSize, Effect.LIVE] = Field(
        default=10_000_000, alias="max_body"
    )
    frontends: int = Field(default=2, ge=1, le=64)
    wait_comments_s: Annotated[DurationOrZero, Effect.LIVE] = Field(
        default=2.0, alias="wait_comments"
    )
    tls_cert: AbsolutePath | None = None
    tls_key: AbsolutePath | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        return self


class PathSettings(Section):
    """``[paths]``: absolute paths; defaults depend on the user, see ``load_settings``.

    ``hf_cache`` None is the folder of the Hugging Face library for the daemon's user, an empty list
    no folder. ``workloads_dir`` serves ``gpupool simulate``; the daemon does not read the folder.
    """

    state_dir: AbsolutePath
    runtime_dir: Annotated[AbsolutePath, AfterValidator(check_socket_folder)]
    model_dirs: Annotated[tuple[AbsolutePath, ...], BeforeValidator(as_tuple), Effect.LIVE]
    log_dir: AbsolutePath
    download_dir: AbsolutePath
    hf_cache: Annotated[tuple[AbsolutePath, ...] | None, BeforeValidator(as_tuple), Effect.LIVE] = (
        None
    )
    workloads_dir: Annotated[AbsolutePath | None, Effect.LIVE] = None


class DeviceSettings(Section):
    """A ``[[device]]``: a GPU, or a group of GPUs that run each model together.

    ``memory_bytes`` is the memory of each GPU of an emulated device, and an upper limit for each
    GPU of other devices (None for all memory). ``index`` is the CUDA ordinal of a single GPU, None
    for groups and other kinds. ``gpus_as_written`` has the ordinals of a group, or the number of
    GPUs of other kinds; read ``gpus`` and ``num_gpus`` instead. ``gpu`` is the GPU simulated by a
    ``sim`` device. With ``page_bytes`` None the worker chooses. ``link`` is the bandwidth in each
    direction of a modelled link between the host and each GPU of an emulated device.
    """

    kind: Literal["emulated", "cuda", "sim"]
    memory_bytes: PositiveSize | None = Field(default=None, alias="memory")
    index: int | None = Field(default=None, ge=0)
    gpus_as_written: Annotated[tuple[int, ...] | int | None, BeforeValidator(group_value)] = Field(
        default=None, alias="gpus"
    )
    gpu: str | None = None
    page_bytes: PositiveSize | None = None
    link_bytes_per_s: LinkRate | None = Field(default=None, alias="link")

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
        if self.kind != "emulated" and self.link_bytes_per_s is not None:
            raise ValueError('link is for kind = "emulated" only')
        check_gpu(self.kind, self.gpu)
        check_group(self.kind, self.gpus_as_written, self.index)
        if self.kind == "sim" and self.page_bytes is not None:
            raise ValueError('page_bytes is not for kind = "sim", which has no pages')
        step = CUDA_GRANULARITY_BYTES if self.kind == "cuda" else HOST_PAGE_BYTES
        if self.page_bytes is not None and self.page_bytes % step:
            raise ValueError(
                f"page_bytes must be a multiple of {format_bytes(step)} on a {self.kind} device"
            )
        return self

    @property
    def gpus(self) -> tuple[int, ...]:
        """The CUDA ordinals in the order of the ranks; empty for devices that are not CUDA's."""
        if isinstance(self.gpus_as_written, tuple):
            return self.gpus_as_written
        return () if self.index is None else (self.index,)

    @property
    def num_gpus(self) -> int:
        """The number of GPUs, which is the degree of tensor parallelism; 1 for a single GPU."""
        written = self.gpus_as_written
        return written if isinstance(written, int) else len(self.gpus) or 1


class MemorySettings(Section):
    """``[memory]``: budgets of host memory, disk, and device memory reserved for activations.

    None in a key ``..._or_auto`` means that :mod:`gpupoold.config.fitting` works the figure out
    from the machine. ``prefix_cache`` limits the KV of ended requests in ``kv_host``: None for no
    limit of its own, 0 to keep none; ``kv_files`` limits the files with such KV. ``engines`` limits
    the memory of engines outside the pages of a device, see ``engines_for``. A model's self-check
    is repeated after ``self_check_interval`` transfers of the weights to a device; 0 disables these
    checks.
    """

    model_cache_or_auto: Annotated[AutoSize, Effect.LIVE] = Field(default=None, alias="model_cache")
    snapshot_files_bytes: Annotated[Size, Effect.LIVE] = Field(default=0, alias="snapshot_files")
    kv_host_or_auto: AutoSize = Field(default=None, alias="kv_host")
    prefix_cache_bytes: Size | None = Field(default=None, alias="prefix_cache")
    kv_files_bytes: Size = Field(default=0, alias="kv_files")
    reserve_or_auto: AutoSize = Field(default=None, alias="reserve")
    engines_bytes: Annotated[Size | None, Effect.LIVE] = Field(default=None, alias="engines")
    self_check_interval: Annotated[int, Effect.LIVE] = Field(default=1000, ge=0)

    @property
    def model_cache_bytes(self) -> int:
        """The budget of the model cache, once worked out."""
        assert self.model_cache_or_auto is not None, "memory.model_cache is not worked out"
        return self.model_cache_or_auto

    @property
    def kv_host_bytes(self) -> int:
        """The KV host cache of each GPU, once worked out."""
        assert self.kv_host_or_auto is not None, "memory.kv_host is not worked out"
        return self.kv_host_or_auto

    def reserve_for(self, kind: str) -> int:
        """Return the bytes to leave free on each GPU of a device of this kind.

        Devices of several kinds share no figure: each kind has its default.
        """
        if self.reserve_or_auto is not None:
            return self.reserve_or_auto
        return CUDA_RESERVE_BYTES if kind == "cuda" else 0

    def engines_for(self, reserve_free_bytes: int | None, num_gpus: int = 1) -> int | None:
        """Return the limit for engines on all GPUs of a device, None for no limit.

        By default most of the reserve that is free at the worker's start, on all GPUs together; a
        part is left for activations of later steps.
        """
        if self.engines_bytes is not None:
            return self.engines_bytes * num_gpus
        return None if reserve_free_bytes is None else int(_ENGINES_SHARE * reserve_free_bytes)


class SimulatedHostSettings(Section):
    """``[simulated_host]``: the host memory of a box with simulated devices only.

    With ``memory`` the daemon works out and applies the budgets of host memory as on a host of this
    size; without, simulated devices have no such budgets.
    """

    memory_bytes: PositiveSize | None = Field(default=None, alias="memory")
    numa_nodes: int = Field(default=1, ge=1, le=64)


class SchedulingSettings(Section):
    """``[scheduling]``: the policy, and the limit of a model's turn while other models wait.

    ``roles`` has a role for each device, in order; for ``auto`` the policy chooses.
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
    """``[security]``: trust in checkpoints, clients and the environment.

    The first two keys let a checkpoint run its own code in a worker. ``media_hosts`` lists the
    hosts of images, audio and video. ``vllm_variables`` lists environment variables for workers and
    frontends besides ``KNOWN_VARIABLES``.
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
    """``[history]``: the maximum of rows per table; the oldest rows are deleted first."""

    effect: ClassVar[Effect] = Effect.LIVE

    max_requests: Count = 100_000
    max_switches: Count = 100_000
    max_events: Count = 10_000
    max_minutes: Count = 200_000
    max_usage_hours: Count = 200_000
    max_device_minutes: Count = 400_000


class LimitSettings(Section):
    """``[limits]``: bounds of queues, and time limits.

    ``drop_late`` drops requests whose first token would be late. ``max_bytes_in_flight`` bounds the
    bytes of requests that are read, wait or run; an API key gets at most half. ``max_images`` is
    per prompt, ``max_image_pixels`` for all images of an HTTP request.
    """

    effect: ClassVar[Effect] = Effect.LIVE

    max_live_requests_per_model: Count = 1024
    max_live_requests: Count = 4096
    max_bytes_in_flight_or_auto: AutoPositiveSize = Field(default=None, alias="max_bytes_in_flight")
    max_images: Annotated[Count, Effect.LOADS] = 16
    max_image_pixels: Annotated[Count, Effect.LOADS] = 32_000_000
    drop_late: bool = False
    load_timeout_s: Duration = Field(default=600.0, alias="load_timeout")
    drain_timeout_s: Duration = Field(default=600.0, alias="drain_timeout")
    stop_grace_s: Duration = Field(default=10.0, alias="stop_grace")
    hang_timeout_s: Duration = Field(default=60.0, alias="hang_timeout")
    token_timeout_s: Duration = Field(default=600.0, alias="token_timeout")

    @property
    def max_bytes_in_flight(self) -> int:
        """The bound in bytes; the least one until worked out."""
        return self.max_bytes_in_flight_or_auto or LEAST_BYTES_IN_FLIGHT


class LogSettings(Section):
    """``[log]``."""

    effect: ClassVar[Effect] = Effect.LIVE

    level: Literal["debug", "info", "warning", "error"] = "info"
