"""The sections of the configuration, a class for each section, with defaults."""

from __future__ import annotations

import socket
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from gpupoold.config.device_names import check_gpu, check_group, group_value
from gpupoold.config.values import (
    ANY_ORIGIN,
    AbsolutePath,
    AutoPositiveSize,
    AutoSize,
    Count,
    Duration,
    DurationOrZero,
    Effect,
    HostNames,
    LinkRate,
    Origins,
    PositiveSize,
    Section,
    Size,
    as_tuple,
    check_host,
    check_socket_folder,
)
from gpupoold.units import format_bytes

GIB = 2**30
_GB = 10**9
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
    if names == "auto" or (isinstance(names, tuple) and all(name in known for name in names)):
        return names
    shown = ", ".join(f'"{name}"' for name in known)
    raise ValueError(f'{value!r}: write "auto", or a list with one role of {shown} for each device')


class ServerSettings(Section):
    """``[server]``: the public HTTP address; HTTPS with a certificate and a key."""

    host: Annotated[str, AfterValidator(check_host)] = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 selects any free port."""
    max_body_bytes: Annotated[PositiveSize, Effect.LIVE] = Field(
        default=10_000_000, alias="max_body"
    )
    """Largest request body; larger bodies are answered with 413."""
    frontends: int = Field(default=2, ge=1, le=64)
    """Number of processes that accept connections, 1 to 64."""
    wait_comments_s: Annotated[DurationOrZero, Effect.LIVE] = Field(
        default=2.0, alias="wait_comments"
    )
    """Interval of the comments in waiting streams, at least 0.5 s; `0` for none."""
    tls_cert: AbsolutePath | None = None
    """Certificate for HTTPS (PEM, followed by its chain)."""
    tls_key: AbsolutePath | None = None
    """Private key of the certificate (PEM, not encrypted, not readable by everyone)."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        return self

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


class PathSettings(Section):
    """``[paths]``: absolute paths; defaults depend on the user, see ``schema.examine``."""

    state_dir: AbsolutePath
    """Database and other data that must survive a restart."""
    runtime_dir: Annotated[AbsolutePath, AfterValidator(check_socket_folder)]
    """Admin socket; `$GPUPOOL_RUNTIME_DIR` replaces the default."""
    model_dirs: Annotated[tuple[AbsolutePath, ...], BeforeValidator(as_tuple), Effect.LIVE]
    """Folders in which a model's name is looked up, in this order."""
    log_dir: AbsolutePath
    """Logs of all processes, at most 64 MiB each; by default `logs` in `state_dir`."""
    download_dir: AbsolutePath
    """Checkpoints from the Hugging Face hub; by default `models` in `state_dir`."""
    hf_cache: Annotated[tuple[AbsolutePath, ...] | None, BeforeValidator(as_tuple), Effect.LIVE] = (
        None
    )
    """Hugging Face caches of other programs, whose complete snapshots are used in place. By default
    the cache of the daemon's user (`HF_HUB_CACHE`, `HF_HOME`); `[]`: none.
    """
    workloads_dir: Annotated[AbsolutePath | None, Effect.LIVE] = None
    """Recorded workloads for the presets of `gpupool simulate`; not read by the daemon."""


class DeviceSettings(Section):
    """A ``[[device]]``: a GPU, or a group of GPUs that run each model together.

    Read ``gpus`` and ``num_gpus`` instead of ``gpus_as_written``.
    """

    kind: Literal["emulated", "cuda", "sim"]
    """`"cuda"`: a GPU; `"emulated"`: a small device in host memory; `"sim"`: simulated, no engine.
    """
    memory_bytes: PositiveSize | None = Field(default=None, alias="memory")
    """Size of an emulated device; for other kinds the maximum to use, by default all. For a group:
    of each GPU.
    """
    index: int | None = Field(default=None, ge=0)
    """CUDA ordinal; by default the lowest unused. Devices with the same ordinal share a GPU with
    one worker each: each must set `memory`, and `memory.reserve` is subtracted for each.
    """
    gpus_as_written: Annotated[tuple[int, ...] | int | None, BeforeValidator(group_value)] = Field(
        default=None, alias="gpus"
    )
    """A group of at most 8 GPUs: on CUDA the list of ordinals, such as `[0, 1, 2, 3]`; on other
    devices the number of GPUs, such as `2`. By default a single GPU.
    """
    gpu: str | None = None
    """GPU that a `"sim"` device must name, a name of `hardware.toml` such as `"H800"`."""
    page_bytes: PositiveSize | None = None
    """Size of a page of device memory, a multiple of 2 MiB on CUDA (by default 8 MiB) and of 4 KiB
    on emulated devices. Larger pages are mapped faster but enlarge KV extents.
    """
    link_bytes_per_s: LinkRate | None = Field(default=None, alias="link")
    """Bandwidth of a modelled link between host memory and an emulated device, in each direction,
    from `"1MB/s"` to `"1TB/s"`; copies then leave the cores to the engines, as on a GPU. By default
    the host's cores copy as fast as they can.
    """
    pin_bytes_per_s: LinkRate | None = Field(default=None, alias="pinning")
    """Rate at which a modelled driver of an emulated device pins host memory, such as `"10GB/s"`.
    Steps of all workers wait meanwhile, and copies of memory that is not pinned pass through
    buffers, as on a GPU. By default no memory needs to be pinned.
    """
    pinned_limit_bytes: Size | None = Field(default=None, alias="pinning_limit")
    """Memory of a worker that the modelled driver pins at most; by default any."""

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
        if self.kind != "emulated" and self.pin_bytes_per_s is not None:
            raise ValueError('pinning is for kind = "emulated" only')
        if self.pinned_limit_bytes is not None and self.pin_bytes_per_s is None:
            raise ValueError("pinning_limit is for a device with pinning only")
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
    from the machine.
    """

    model_cache_or_auto: Annotated[AutoSize, Effect.LIVE] = Field(default=None, alias="model_cache")
    """Host memory for weights snapshots, with which models are switched in without reading the
    disk. Snapshots of idle models are evicted, least recently used first; the next request restores
    them.
    """
    snapshot_files_bytes: Annotated[Size, Effect.LIVE] = Field(default=0, alias="snapshot_files")
    """Disk space for snapshot files, in `state_dir/snapshots`, from which a restarted daemon loads
    models. 0: none.
    """
    kv_host_or_auto: AutoSize = Field(default=None, alias="kv_host")
    """Host memory for offloaded KV and KV transfers, for each GPU."""
    prefix_cache_bytes: Size | None = Field(default=None, alias="prefix_cache")
    """Limit for the part of `kv_host` with KV of ended requests; by default all that paused
    requests leave. 0: none.
    """
    kv_files_bytes: Size = Field(default=0, alias="kv_files")
    """Disk space for KV of ended requests, in `state_dir/kv` on a local disk of a few GB/s, also
    for after a restart. Not encrypted. 0: none.
    """
    reserve_or_auto: AutoSize = Field(default=None, alias="reserve")
    """Free memory on each GPU for the driver, libraries and activations. The memory that each
    engine needs besides is not part of this budget.
    """
    engines_bytes: Annotated[Size | None, Effect.LIVE] = Field(default=None, alias="engines")
    """Limit for the memory of engines outside the pages of each GPU, measured at their loads; by
    default on CUDA three quarters of the reserve that is free at the worker's start, elsewhere
    none. A smaller limit evicts only at the next loads.
    """
    self_check_interval: Annotated[int, Effect.LIVE] = Field(default=1000, ge=0)
    """Times that a model's weights are brought onto a device between two self-checks; 0: none."""

    @property
    def model_cache_bytes(self) -> int:
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
    """``[simulated_host]``: the host memory of a box with simulated devices only."""

    memory_bytes: PositiveSize | None = Field(default=None, alias="memory")
    """Host memory for the budgets, instead of this machine's; models that exceed the model cache
    are refused. By default simulated devices have no budgets of host memory.
    """
    numa_nodes: int = Field(default=1, ge=1, le=64)
    """NUMA nodes, 1 to 64, that share the memory and the devices equally."""


class SchedulingSettings(Section):
    """``[scheduling]``: the policy, and the limit of a model's turn while other models wait."""

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
    """`gpupool`, `aegaeon`, `request-level`, `request-level-4`, `static`, `prefill-first` or
    `decode-first`.
    """
    roles: Annotated[Literal["auto"] | tuple[RoleName, ...], BeforeValidator(_roles)] = "auto"
    """`"auto"`, or a list with a role of each device: `prefill` (prompts), `decode` (answers),
    `mixed` or `auto` (by the policy). `gpupool role set` changes roles at run time.
    """
    quota_max_s: Duration = Field(default=4.0, alias="quota_max")
    """Maximum length of a turn while another model waits (policies `gpupool` and `aegaeon`)."""


class SecuritySettings(Section):
    """``[security]``: trust in checkpoints, clients and the environment."""

    effect: ClassVar[Effect] = Effect.LOADS

    allow_remote_code: bool = False
    """Load checkpoints with Python code (`auto_map`): their authors can run code on this machine.
    """
    allow_pickle: bool = False
    """Load pickle files (`*.bin`, `*.pt`, `*.pth`) of checkpoints without safetensors: the same
    risk.
    """
    media_hosts: HostNames = ()
    """Hosts, with all ports, from which images of requests are fetched; `data:` URLs need none."""
    vllm_variables: Annotated[
        tuple[Annotated[str, Field(pattern=r"^VLLM_[A-Z0-9_]+$")], ...],
        BeforeValidator(as_tuple),
        Effect.RESTART,
    ] = ()
    """`VLLM_*` variables that workers and frontends get besides the harmless variables."""


class HistorySettings(Section):
    """``[history]``: the maximum of rows per table; the oldest rows are deleted first."""

    effect: ClassVar[Effect] = Effect.LIVE

    max_requests: Count = 100_000
    """Finished requests."""
    max_switches: Count = 100_000
    """Switches with the times of their stages."""
    max_events: Count = 10_000
    """Events."""
    max_minutes: Count = 200_000
    """Minutes of a model with requests: tokens, attainment, latencies."""
    max_usage_hours: Count = 200_000
    """Hours of a model and API key: requests, tokens, GPU seconds, energy."""
    max_device_minutes: Count = 400_000
    """Minutes of a device: time of steps and switches, energy, use of the KV host cache."""


class LimitSettings(Section):
    """``[limits]``: bounds of queues, and time limits."""

    effect: ClassVar[Effect] = Effect.LIVE

    max_live_requests_per_model: Count = 1024
    """Live requests of one model, counting samples of `n`; further requests get 429."""
    max_live_requests: Count = 4096
    """Live requests of all models."""
    max_bytes_in_flight_or_auto: AutoPositiveSize = Field(default=None, alias="max_bytes_in_flight")
    """Bytes of requests being read, waiting or running: HTTP bodies in the frontends, in equal
    shares, and encoded requests in the daemon. One API key may use half; further requests get 429.
    """
    max_images: Annotated[Count, Effect.LOADS] = 16
    """Images of one prompt, else 400; a model's option `limit_mm_per_prompt` takes precedence."""
    max_image_pixels: Annotated[Count, Effect.LOADS] = 32_000_000
    """Pixels of all images of one HTTP request, else 400. A frontend needs about 14 bytes per pixel
    to prepare images, for two requests at once.
    """
    drop_late: bool = False
    """Refuse a request with 429 if its first token cannot meet the TTFT target, and end a request
    that has not begun by then; by default such requests are served late.
    """
    load_timeout_s: Duration = Field(default=600.0, alias="load_timeout")
    """Time to load a model, then marked failed; to start a worker, then replaced; to restore a
    snapshot, whose waiting requests then end with an error.
    """
    drain_timeout_s: Duration = Field(default=600.0, alias="drain_timeout")
    """Time that draining or removing a model or a device waits for requests."""
    stop_grace_s: Duration = Field(default=10.0, alias="stop_grace")
    """Time for frontends, then workers, to stop before they are killed; open streams may finish
    until two seconds before the end.
    """
    hang_timeout_s: Duration = Field(default=60.0, alias="hang_timeout")
    """Time without a sign of life, or in a turn without a step, after which a worker is replaced;
    loads do not count.
    """
    token_timeout_s: Duration = Field(default=600.0, alias="token_timeout")
    """Time without a token after which a request ends with an error that names the cause."""

    @property
    def max_bytes_in_flight(self) -> int:
        return self.max_bytes_in_flight_or_auto or LEAST_BYTES_IN_FLIGHT


class LogSettings(Section):
    """``[log]``."""

    effect: ClassVar[Effect] = Effect.LIVE

    level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning` or `error`."""


class AccessSettings(Section):
    """``[access]``: the need for API keys, and the groups that may use the admin socket."""

    require_keys: Literal["auto", "always"] = "auto"
    """`"auto"`: API keys are required unless only this machine can connect; `"always"`: also then,
    for example behind a proxy on the same machine.
    """
    host_names: HostNames = ()
    """Names, besides loopback names, under which clients without a key may call the API."""
    allowed_origins: Origins = ()
    """Origins of other sites whose pages may call the API, such as `["https://app.example"]`;
    `["*"]` allows all and needs `require_keys = "always"`.
    """
    share_prefixes: bool = False
    """Whether requests use cached KV of requests of other keys."""
    admin_group: str = Field(default="gpupool", min_length=1)
    """Group with full access to the admin socket; need not exist."""
    read_only_group: str = Field(default="gpupool-ro", min_length=1)
    """Group with read access to the admin socket; need not exist."""

    @model_validator(mode="after")
    def _needs_keys_for_any_origin(self) -> Self:
        if ANY_ORIGIN in self.allowed_origins and self.require_keys != "always":
            raise ValueError(
                'allowed_origins = ["*"] needs require_keys = "always": without keys, each page '
                "that a browser of this machine opens could call the API"
            )
        return self


class TracesSettings(Section):
    """``[traces]``: OpenTelemetry spans of requests, sent by OTLP over HTTP."""

    endpoint: str = ""
    """URL of an OpenTelemetry collector for traces of requests, such as
    `"http://127.0.0.1:4318/v1/traces"`; empty: no traces.
    """
    share: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """Share of the requests without a `traceparent` of their own that are recorded."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if endpoint and not endpoint.startswith(("http://", "https://")):
            text = f'{endpoint!r}: write a URL such as "http://127.0.0.1:4318/v1/traces"'
            raise ValueError(text)
        return endpoint


class BatchSettings(Section):
    """``[batches]``: bounds of uploaded files and of batches."""

    max_bytes: PositiveSize = 20 * _GB
    """Files, batches and results of all API keys together."""
    max_key_bytes: PositiveSize = 4 * _GB
    """Files, batches and results of one API key; requests without a key count as one key. A file
    counts as at least 4,096 bytes, a batch with its metadata.
    """
    max_file_bytes: PositiveSize = _GB // 5
    """One file."""
    max_key_files: Count = 10_000
    """Files of one API key, results included."""
    max_key_batches: Count = 10_000
    """Batches of one API key, ended batches included until removed."""
    max_requests: Count = 50_000
    """Requests of one batch."""
    max_live: int = Field(default=64, ge=1, le=1024)
    """Requests of batches that run, or wait for spare time, at once: of one batch at most three
    quarters, of one API key seven eighths; a free place goes to the key with the fewest.
    """
    keep_s: Duration = Field(default=30 * 86_400.0, alias="keep")
    """Time after which files and ended batches are removed."""


class IdleSettings(Section):
    """``[idle]``: devices without requests."""

    effect: ClassVar[Effect] = Effect.LIVE

    park_after_s: DurationOrZero = Field(default=0.0, alias="park_after")
    """A device without requests for so long, such as `"30m"`, gives its memory
    back until the next request; 0: never.
    """


class FrontendSettings(Section):
    """Settings of a frontend from its start to its end, which the daemon sends as JSON.

    ``number`` distinguishes the frontends; all serve the batches in ``batches_folder``, which the
    first runs. A stopping frontend that ``refuses_at_end`` answers new connections with 503.
    """

    number: int = 0
    batches_folder: AbsolutePath
    log_level: str = "info"
    refuses_at_end: bool = False
    server: ServerSettings = ServerSettings()
    traces: TracesSettings = TracesSettings()
    batches: BatchSettings = BatchSettings()
