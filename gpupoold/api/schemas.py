"""Bodies of the admin API, shared by the server, the client, the CLI and the TUI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gpupoold import domain
from gpupoold.durations import GraphSizes, LoadStages
from gpupoold.units import checked_pace

RoleName = Literal["auto", "prefill", "decode", "mixed"]
MAX_DEVICES = 1024


PaceText = Annotated[str, AfterValidator(checked_pace)]
"""The pace of streams."""

Origin = Literal["file", "default", "machine"]
EffectName = Literal["live", "loads", "restart"]


class Body(BaseModel):
    """Base of all bodies; unknown fields are errors, which reveals misspelt names."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(Body):
    """The error of a failed call, under the key ``error``."""

    code: str
    message: str
    hint: str = ""


class LoadingInfo(Body):
    """A model that is being loaded on a device beside the turns.

    ``stage`` completes "the worker ..."; ``num_waiting`` loads follow.
    """

    model: str
    stage: str
    since_s: float
    num_waiting: int = 0


class GpuInfo(Body):
    """A GPU of a group; readings come from NVML, None if unknown.

    ``gpu`` is the CUDA ordinal, or the number within the group on other kinds of devices. The
    GPUs hold equal parts of ``memory_bytes``, the memory for weights and KV, and ``free_bytes``.
    ``used_bytes`` counts all processes on the GPU.
    """

    gpu: int
    memory_bytes: int
    free_bytes: int
    utilisation: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    used_bytes: int | None = None


class DeviceInfo(Body, domain.DeviceActivity, domain.DeviceFacts):
    """A device and its worker.

    ``num_waiting_for_kv`` requests wait for free KV memory. ``quota_s`` None means an unlimited
    turn. ``utilisation`` (0 to 1), temperature and power come from NVML, None if unknown.

    Memory consists of weights, KV and free bytes, except while a model loads. ``quota_used_s`` is
    the run time of the present turn, 0 while its model is brought in; ``quota_left_s`` is the
    remaining time, 0 if the turn is extended because no other model waits, None if ``quota_s`` is
    None. Both are at most 0.25 s old.

    ``gpus`` has the GPUs of a group, empty for a single GPU. A group's bytes and power are sums
    over the GPUs, the utilisation is the mean, the temperature the highest.

    ``engine_bytes`` is the memory of the ``num_engines`` engines outside the pages,
    ``engine_limit_bytes`` the limit, None for no limit.
    """

    device: int
    kind: str
    pid: int | None
    state: str
    quota_s: float | None
    num_waiting_for_kv: int
    role: str = "mixed"
    is_role_fixed: bool = False
    is_draining: bool = False
    num_requests: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    quota_used_s: float = 0.0
    quota_left_s: float | None = None
    utilisation: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    num_engines: int = 0
    engine_bytes: int = 0
    engine_limit_bytes: int | None = None
    loading: LoadingInfo | None = None
    gpus: list[GpuInfo] = Field(default_factory=list)


class SetDeviceRequest(Body):
    """Body of ``PATCH /devices/{device}``; ``auto`` leaves the role to the policy."""

    role: RoleName


class DraftUsage(Body):
    """Speculative decoding since the daemon's start.

    ``acceptance_length`` is the mean number of tokens of an answer in a step with a draft: 1 and
    the accepted tokens of the draft.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float


class EngineInfo(Body):
    """A model's engine on a device: its memory outside the pages, and the time of its load.

    ``graphs`` counts sizes of batches with CUDA graphs.
    ``device_bytes`` are of the device's reserve, ``host_bytes`` private and pinned memory of the
    worker; both are the same memory on an emulated device. ``resident_bytes`` of the weights had
    stayed on the device before the load, and were not copied. ``why_unshared`` is the reason why no
    fine-tune can take the engine over, empty if fine-tunes can.
    """

    device: int
    device_bytes: int
    host_bytes: int
    load: LoadStages = LoadStages()
    graphs: GraphSizes = GraphSizes()
    resident_bytes: int = 0
    why_unshared: str = ""


class OperateRequest(Body):
    """Body of ``POST /devices/{device}/operations``: an operation of ``GPUPOOL_OPERATIONS``."""

    operation: str
    arguments: dict[str, Any]


class SetHostingRequest(Body):
    """Body of ``PUT /hosting/{name}``: the devices for the model's engines; empty leaves the choice
    to the scheduler.
    """

    devices: list[int] = Field(max_length=MAX_DEVICES)


@dataclass
class _UsageHead:
    name: str
    state: str
    num_live: int
    num_waiting: int


class ModelUsage(Body, domain.Percentiles, domain.MainCounts, domain.MemoryUse, _UsageHead):
    """A model's present state and recent past; times are None before the first measurement.

    Bytes are sums over devices. ``cached_bytes`` counts the snapshots in host memory, each shared
    by all devices with equally many GPUs. Counts start with the daemon; percentiles cover the last
    hour. ``attainment_minutes`` has 60 values, the present minute last, None for a minute without
    tokens. ``tokens_per_s`` covers the last 10 s. ``drafts`` is None without speculative decoding.
    ``engines`` are on the devices that host the model. Without one, ``slots`` are the devices with
    an engine of another fine-tune, which the model can take over. ``unbound_bytes`` are the weights
    that stay on devices without an engine, in memory that is free; an engine there maps them.
    """

    cached_bytes: int
    attainment: float | None
    attainment_1m: float | None = None
    attainment_1h: float | None = None
    attainment_minutes: list[float | None] = []
    tokens_per_s: float = 0.0
    drafts: DraftUsage | None = None
    engines: list[EngineInfo] = []
    slots: list[int] = []
    unbound_bytes: dict[int, int] = {}


@dataclass
class LiveProgress:
    """The age and the tokens of a live request."""

    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    next_deadline_in_s: float


@dataclass
class _RequestHead:
    request_id: str
    model: str
    device: int | None


class RequestInfo(Body, LiveProgress, _RequestHead):
    """A live request; the body has the fields of ``_RequestHead`` first."""


class LogLine(Body):
    """A line of the log of a process."""

    process: str
    line: str


class AdditionInfo(Body):
    """A model or adapter that is being added: the latest ``Progress``."""

    name: str
    stage: str
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None


class Running(Body):
    """The devices, the live requests and the switches since the daemon's start."""

    devices: list[DeviceInfo]
    requests: list[RequestInfo]
    num_switches: int
    switched_bytes: int
    additions: list[AdditionInfo] = []


class Ps(Running):
    """Body of ``GET /ps``: running models, devices and requests."""

    models: list[ModelUsage]
    switch_seconds: dict[str, float]


class FrontendInfo(Body):
    """A frontend: ``ready`` accepts connections, ``starting`` mounts the models' APIs."""

    number: int
    state: Literal["ready", "starting", "down"]
    pid: int | None
    num_restarts: int
    num_live_requests: int


class Status(Body):
    """Body of ``GET /status``.

    ``num_keys`` counts the valid API keys; ``tls_cert`` is the certificate's path.
    """

    version: str
    engine_version: str
    pid: int
    uptime_s: float
    state: Literal["starting", "ready", "stopping"]
    http_url: str
    state_dir: str
    model_cache_bytes: int
    model_cache_limit_bytes: int
    rss_bytes: int
    num_models: int
    num_live_requests: int
    num_refused_requests: int
    dropped_history_rows: int
    are_keys_required: bool = False
    num_keys: int = 0
    tls_cert: str | None = None
    frontends: list[FrontendInfo] = []


class MachineInfo(BaseModel):
    """The surroundings of a daemon: ``config_path`` is None without a file.

    The folders are as the daemon finds them, in its own namespace and as its user.

    The limits are soft limits of the daemon's process; None means unlimited.
    """

    config_path: str | None
    folders: list[domain.Folder]
    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    address_space_bytes: int | None = None
    memory_limit_bytes: int | None


@dataclass
class _User:
    model: str
    api_key: str
    key_name: str


class UseInfo(Body, domain.UseCounts, _User):  # the body has the fields of _User first
    """Use of a model with an API key; ``api_key`` and ``key_name`` are empty without one."""


class UsageInfo(Body):
    """Use since ``since`` (wall-clock seconds), which begins an hour, and work of the devices."""

    since: float
    uses: list[UseInfo]
    devices: list[domain.DeviceUse]


@dataclass(frozen=True, kw_only=True)
class BatchInfo(domain.BatchRecord):
    """A batch for the operator, with at most eight models.

    ``key`` is the name of the API key, its id if the key was removed, empty without one. ``reason``
    says why requests wait for another try; empty if none has been refused.
    """

    key: str
    state: str
    reason: str


class SnapshotPlace(Body):
    """The place of a model's snapshot for devices of ``num_gpus`` GPUs.

    ``nodes`` has the NUMA node of each GPU's part in host memory, -1 if unknown.
    """

    num_gpus: int
    state: Literal["host", "disk", "none"]
    num_bytes: int
    is_saved: bool
    nodes: list[int] = Field(default=[])


class CachedModel(Body):
    """A model's weights snapshots: in host memory, on disk only, or absent.

    ``snapshots`` has one entry for each number of GPUs of the model's devices. ``state`` is "host"
    if one of these is in host memory; ``is_saved`` means all. ``num_bytes`` is the sum of the
    sizes, of the expected sizes of absent snapshots too. ``last_used_at`` is in wall-clock seconds.
    ``unbound_bytes`` are the weights that stay on devices without an engine.
    """

    name: str
    state: Literal["host", "disk", "none"]
    num_bytes: int
    is_saved: bool
    is_pinned: bool
    num_live: int
    last_used_at: float | None
    snapshots: list[SnapshotPlace] = Field(default=[])
    unbound_bytes: dict[int, int] = Field(default={})


class UnpinnedMemory(Body):
    """Host memory that a device's driver has not pinned, so that copies pass through buffers.

    ``problem`` is the driver's refusal; empty if the memory will be pinned in idle moments.
    """

    device: int
    num_bytes: int
    problem: str


class BoundEngine(Body):
    """An engine on a device, and the model that has it now.

    ``num_bytes`` is its memory outside the pages. The models ``siblings`` can take the engine over;
    none can if there is a reason ``why_unshared``.
    """

    device: int
    model: str
    num_bytes: int
    siblings: list[str]
    why_unshared: str = ""


class CacheInfo(Body):
    """``GET /cache``: bytes used of the budgets for snapshots, snapshots by model, and engines."""

    host_bytes: int
    host_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    models: list[CachedModel]
    unpinned: list[UnpinnedMemory] = Field(default=[])
    engines: list[BoundEngine] = Field(default=[])


class SetCachedRequest(Body):
    """``PATCH /cache/{name}``."""

    is_pinned: bool


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """A finished turn; ids increase by one while the daemon runs.

    ``began_at`` (wall-clock seconds) is the time when the model could run. ``switch_kind`` is the
    largest kind of transfer during the preceding ``switch_s``: weights, KV, only mappings
    (``pages``) or ``none``. A prefetch whose turn was cancelled is a turn of 0 s with ``did_run``
    false.
    """

    id: int
    device: int
    model: str
    began_at: float
    seconds: float
    num_tokens: int
    switch_kind: domain.LargestTransfer
    switch_s: float
    did_run: bool = True


class TopModel(Body):
    """A model's row: targets, memory, requests and devices.

    ``devices`` have all weights of the model; ``fixed_devices`` were chosen by hand for its
    engines.
    """

    usage: ModelUsage
    ttft_s: float
    tbt_s: float
    is_pinned: bool
    devices: list[int]
    fixed_devices: list[int] = Field(default_factory=list)


class Top(Running):
    """Body of ``GET /top``: the state ``at`` one moment (wall-clock seconds).

    ``requests`` are the oldest live requests up to the asked number; ``turns`` and ``events``
    follow the given ids, the latest ones if there are more.
    """

    at: float
    status: Status
    models: list[TopModel]
    turns: list[TurnInfo]
    last_turn_id: int
    events: list[domain.Event]
    last_event_id: int


class Unloaded(Body):
    """Bytes that ``DELETE /loaded/{name}`` freed on devices and in host memory."""

    name: str
    device_bytes: int
    host_bytes: int


class CancelledRequest(Body):
    """What ``DELETE /requests/{id}`` ended: ``num_requests`` prompts or samples of one client's
    request, of which ``request_id`` is the first.
    """

    request_id: str
    model: str
    num_output_tokens: int
    num_requests: int = 1


class SettingInfo(BaseModel):
    """A key, its value as written in a file, and the value's origin.

    ``value`` is None for a key that is not set. ``is_hidden`` is always false, and stays for the
    readers of the API. ``reason`` has the arithmetic of a value that was worked out from the
    machine. ``effect`` says when a change applies: ``live`` at once, ``loads`` for models loaded
    later, ``restart`` after a restart of gpupoold.
    """

    key: str
    value: Any
    is_hidden: bool = False
    origin: Origin
    effect: EffectName
    reason: str = ""


class ConfigInfo(BaseModel):
    """A daemon's configuration; ``path`` is None without a file."""

    path: str | None
    settings: list[SettingInfo]


class ChangeInfo(BaseModel):
    """A changed key; ``before`` and ``after`` are None if not set.

    ``is_hidden`` is always false, and stays for the readers of the API.
    """

    key: str
    before: Any
    after: Any
    is_hidden: bool = False
    effect: EffectName


class DiffInfo(BaseModel):
    """The changes that a file would make."""

    path: str | None
    changes: list[ChangeInfo]


class DiffRequest(Body):
    """The file to compare: its ``text``, or None for the daemon's own file.

    ``name`` stands for the file in errors.
    """

    text: str | None = None
    name: str = ""


class ReloadInfo(BaseModel):
    """The changes of a reload: those in effect, and those that wait for a restart."""

    path: str | None
    changed: list[ChangeInfo]
    waiting: list[ChangeInfo]
