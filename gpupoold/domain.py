"""Types for the project's terms: ids, targets, states. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, NewType

ModelName = NewType("ModelName", str)
DeviceId = NewType("DeviceId", int)

DEFAULT_TTFT_S = 10.0
DEFAULT_TBT_S = 0.1


@dataclass(frozen=True, slots=True)
class Targets:
    """A model's targets for its users.

    Token ``i`` (from 0) of a request is due at ``arrival + ttft_s + i * tbt_s``; a late token does
    not move later deadlines.
    """

    ttft_s: float = DEFAULT_TTFT_S
    tbt_s: float = DEFAULT_TBT_S

    def __post_init__(self) -> None:
        if not all(math.isfinite(target) and target > 0 for target in (self.ttft_s, self.tbt_s)):
            raise ValueError(
                f"targets must be positive and finite, got ttft {self.ttft_s}, tbt {self.tbt_s}"
            )

    def deadline_s(self, arrival_s: float, token_index: int) -> float:
        """Return the deadline of a token of a request that arrived at ``arrival_s``."""
        return arrival_s + self.ttft_s + token_index * self.tbt_s

    def deadlines_s(self, arrival_s: float, num_tokens: int) -> list[float]:
        """Return the deadlines of the first tokens; quicker than :meth:`deadline_s` for each."""
        first_s, tbt_s = arrival_s + self.ttft_s, self.tbt_s
        return [first_s + index * tbt_s for index in range(num_tokens)]


class ModelState(StrEnum):
    """Life of a registered model.

    ``registered`` (known, not loaded) → ``loading`` → ``ready``; ``draining``
    before removal; ``failed`` with a reason.
    """

    REGISTERED = "registered"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


RemoveMode = Literal["refuse", "drain", "force"]
"""How removing or unloading treats a model's live requests."""


class Role(StrEnum):
    """A device's role: prompts, answers, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Priority(StrEnum):
    """A request's priority where memory or time is short, from its API key.

    ``BACKGROUND`` is the priority of requests in batches, which run in time that others leave; no
    key has it.
    """

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    BACKGROUND = "background"


BACKGROUND_TTFT_S = 86_400.0
"""TTFT target of requests in batches, whose deadlines are hours."""


class FinishReason(StrEnum):
    """The reason for the end of a request, in the history."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class FinalFailure(StrEnum):
    """A failure that another try would only repeat; the value is the ``code`` of the API's error.

    Client libraries repeat 408, 409, 429 and all statuses from 500 on by themselves, but not 422.
    """

    CRASHED_WORKER = "request_crashed_worker"
    CANCELLED = "request_cancelled"
    GRAMMAR = "grammar_over_bound"

    @property
    def status(self) -> HTTPStatus:
        if self is FinalFailure.GRAMMAR:
            return HTTPStatus.BAD_REQUEST
        return HTTPStatus.UNPROCESSABLE_ENTITY


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the configuration; for a missing folder, the facts of the nearest parent.

    ``owner`` is a user id. ``num_bytes`` is the size of the content, 0 if not measured. ``hint``
    says how to let the daemon write to the folder, empty unless the daemon said so.
    """

    key: str
    path: Path
    exists: bool
    is_writable: bool
    owner: int
    filesystem: str
    free_bytes: int
    num_bytes: int = 0
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Preset:
    """A further name of a model, whose requests have other defaults.

    ``defaults`` are values of fields of a request's body, by dotted names such as
    ``chat_template_kwargs.enable_thinking``; ``system_prompt`` is a system message for
    conversations without one. A target of None is the model's.
    """

    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A further name of a model, whose requests use a LoRA adapter.

    ``source`` is the user's text, ``path`` the resolved local folder, ``rank`` the adapter's rank.
    A target of None is the model's.
    """

    name: str
    source: str
    path: str
    revision: str | None = None
    rank: int = 0
    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class Adapter(AdapterInfo):
    """An adapter with its number among all adapters since the daemon's start."""

    number: int = 0


@dataclass(frozen=True)
class ModelDescription:
    """A model as users know the model, with the folder of the checkpoint.

    ``source`` is the user's text (a path or a Hugging Face id), ``path`` the resolved local folder.
    ``max_model_len`` None means the checkpoint's own limit. ``engine`` has vLLM's options by name,
    with values as on vLLM's command line. ``devices`` are the devices chosen by hand for its
    engines; empty leaves the choice to the scheduling core. ``pace`` is the pace of streams, see
    :func:`.units.checked_pace`, empty for none.
    """

    name: ModelName
    source: str
    path: str
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    aliases: tuple[str, ...] = ()
    engine: dict[str, str] = field(default_factory=dict)
    presets: tuple[Preset, ...] = ()
    devices: tuple[int, ...] = ()
    pace: str = ""


@dataclass(frozen=True)
class ModelSpec(ModelDescription):
    """A registered model as stored in the registry."""

    targets: Targets = field(default_factory=Targets)
    adapters: tuple[Adapter, ...] = ()

    @property
    def further(self) -> tuple[Preset | Adapter, ...]:
        return (*self.presets, *self.adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which clients may ask for the model."""
        return (self.name, *self.aliases, *(name_row.name for name_row in self.further))

    def further_named(self, name: str) -> Preset | Adapter | None:
        return next((name_row for name_row in self.further if name_row.name == name), None)

    def targets_of(self, name: str) -> Targets:
        """Return the targets of the model, or of its preset or adapter called ``name``."""
        further = self.further_named(name)
        if further is None:
            return self.targets
        return Targets(further.ttft_s or self.targets.ttft_s, further.tbt_s or self.targets.tbt_s)


@dataclass(frozen=True)
class BatchRecord:
    """A batch of a client; times in wall-clock seconds.

    ``models`` has some models of the requests, none before the input is checked. ``next_try_at`` is
    the time of the next try if requests wait for another try.
    """

    id: str
    endpoint: str
    created_at: int
    expires_at: int
    models: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    next_try_at: int | None = None
    ended_at: int | None = None


@dataclass(frozen=True, slots=True)
class FittedLaw:
    """A law of :mod:`gpupoold.latency` by name, with its constants and the quality of the fit.

    ``r_squared`` and the relative errors are 0 for a law without a fit, ``hidden_size`` and
    ``intermediate_size`` where not needed.
    """

    law: str
    constants: tuple[float, ...]
    r_squared: float = 0.0
    mean_relative_error: float = 0.0
    p90_relative_error: float = 0.0
    num_points: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0


SWITCH_STAGES = ("evict", "map", "weights", "kv")

WarmSource = Literal["resident", "prefetched", "host_cached"]
"""Place of a model's weights at the start of a switch, if not on disk only.

On the device, copied to the device during the previous turn, or (some of them) in host memory.
"""
WeightsSource = Literal[WarmSource, "cold"]
"""Place of a model's weights before a switch; ``cold`` weights were read from disk just before."""
LargestTransfer = Literal["none", "pages", "kv", "weights"]
"""The largest transfer of a switch; ``pages`` are mappings without copies."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of ``device`` from model ``previous`` to ``model``, with stages and moved bytes.

    ``at`` is the start in wall-clock seconds. ``weight_bytes`` does not contain weights that were
    prefetched.
    """

    at: float
    device: int
    model: str
    previous: str | None
    total_s: float = 0.0
    evict_s: float = 0.0
    map_s: float = 0.0
    weights_s: float = 0.0
    kv_s: float = 0.0
    weight_bytes: int = 0
    kv_in_bytes: int = 0
    kv_out_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that moved in the switch itself, in and out."""
        return self.weight_bytes + self.kv_in_bytes + self.kv_out_bytes


@dataclass
class MainCounts:
    """Counts of one model's requests in a span of time.

    Requests count at their arrival, outcomes at the end, tokens when sent. ``refused`` requests are
    not part of ``requests``; ``dropped`` requests ended before their first token, which would have
    been late.
    """

    requests: int = 0
    completed: int = 0
    refused: int = 0
    dropped: int = 0
    tokens: int = 0
    tokens_in_time: int = 0


@dataclass
class RequestCounts(MainCounts):
    """Counts with the other outcomes: ``failed`` includes dropped requests.

    ``first_tokens`` counts requests that got their first token.
    """

    aborted: int = 0
    failed: int = 0
    first_tokens: int = 0


@dataclass
class Percentiles:
    """Percentiles of times to the first and between tokens, None without a measurement."""

    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tbt_p50_s: float | None = None
    tbt_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    """A model in the queue of a device; times are None if the policy gives none.

    ``rule`` decided the model's place; ``why`` is the rule as a sentence.
    """

    model: str
    rule: str
    why: str
    starts_in_s: float | None
    duration_s: float | None
    num_requests: int


@dataclass
class Turns:
    """The present turn on a device and the queue behind the turn.

    ``left_s`` is None for a turn without an end: no other model waits, or the policy sets none.
    """

    device: int
    on_turn: str | None
    rule: str | None
    why: str | None
    used_s: float
    left_s: float | None
    line: list[WaitingTurn]


EventLevel = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Event:
    """An event for the operator; later events have larger ids, ``at`` is in wall-clock seconds."""

    id: int
    at: float
    level: EventLevel
    kind: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request; a time is None if the request ended before.

    ``arrived_at`` is in wall-clock seconds. ``finish_reason`` is a :class:`FinishReason`; ``error``
    is the message sent to the client, empty without a failure; ``api_key`` is the public id of the
    client's key.
    """

    request_id: str
    model: str
    arrived_at: float
    ttft_s: float | None
    tbt_p99_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_tokens_in_time: int
    finish_reason: str
    total_s: float
    error: str = ""
    api_key: str | None = None


@dataclass
class MemoryUse:
    """A model's memory, in bytes.

    ``kv_resident_bytes`` are on devices, ``kv_host_bytes`` of paused requests in host memory.
    ``encoder_bytes`` counts the image encoder's outputs, outside the devices' pages. Since the
    loads of the engines, ``prefix_saved_bytes`` of ended requests' KV were copied to host memory,
    and later requests used ``prefix_hit_bytes`` from there, for which ``prefix_peer_bytes`` came
    from other workers' memory and ``prefix_file_bytes`` from files.
    """

    weights_resident_bytes: int = 0
    weights_total_bytes: int = 0
    kv_resident_bytes: int = 0
    kv_host_bytes: int = 0
    encoder_bytes: int = 0
    prefix_hit_bytes: int = 0
    prefix_saved_bytes: int = 0
    prefix_peer_bytes: int = 0
    prefix_file_bytes: int = 0

    @staticmethod
    def total(parts: Collection[MemoryUse]) -> MemoryUse:
        """Return the sums over devices; the total of weights is that of the largest part."""
        found = MemoryUse(*(sum(getattr(part, name) for part in parts) for name in _MEMORY_NAMES))
        found.weights_total_bytes = max((part.weights_total_bytes for part in parts), default=0)
        return found


_MEMORY_NAMES = tuple(field.name for field in fields(MemoryUse))


@dataclass
class UseCounts:
    """Finished requests with their tokens; seconds of steps times the devices' GPUs, and joules.

    ``energy_j`` is the energy of the devices in these seconds, 0 without readings.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    gpu_s: float = 0.0
    energy_j: float = 0.0

    def add(self, other: UseCounts) -> None:
        self.num_requests += other.num_requests
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_output_tokens += other.num_output_tokens
        self.gpu_s += other.gpu_s
        self.energy_j += other.energy_j


@dataclass
class DeviceFacts:
    """A device's memory for weights and KV, and measured rates; 0 before they are known.

    ``bandwidth_bytes_per_s`` is the rate of a switch including mapping; ``link_in_`` and
    ``link_out_bytes_per_s`` are rates of plain copies. ``kv_host_limit_bytes`` is the size of the
    host's KV cache, None for no limit. ``rank_nodes`` has the NUMA node of each GPU, -1 if unknown,
    and ``far_share`` the share of the rate left to copies from memory of another node.
    """

    device_bytes: int = 0
    page_bytes: int = 0
    bandwidth_bytes_per_s: float = 0.0
    link_in_bytes_per_s: float = 0.0
    link_out_bytes_per_s: float = 0.0
    kv_host_limit_bytes: int | None = None
    rank_nodes: tuple[int, ...] = (-1,)
    far_share: float = 1.0


@dataclass
class DeviceActivity:
    """The present model of a device, its steps and its memory.

    ``prefetched_bytes`` of the weights belong to a coming turn. ``kv_host_bytes`` is host memory
    with KV, without the ``prefix_bytes`` with KV of ended requests. ``num_recomputed`` counts KV
    dropped because host memory was full.
    """

    on_turn: str | None = None
    num_steps: int = 0
    free_bytes: int = 0
    kv_host_bytes: int = 0
    prefix_bytes: int = 0
    num_recomputed: int = 0
    prefetched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Work of a device during ``seconds``: of steps, and of switches.

    ``energy_j`` is None without readings. ``kv_host_bytes`` of the host KV cache were in use, in
    slabs of ``kv_host_slab_bytes``: means over the time.
    """

    device: int
    seconds: float
    computing_s: float
    switching_s: float
    energy_j: float | None
    kv_host_bytes: int
    kv_host_slab_bytes: int

    @property
    def kv_host_fragmentation(self) -> float | None:
        if not self.kv_host_slab_bytes:
            return None
        return max(0.0, 1 - self.kv_host_bytes / self.kv_host_slab_bytes)


COUNT_NAMES = tuple(field.name for field in fields(RequestCounts))
