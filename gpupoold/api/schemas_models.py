"""Bodies of the admin API about models, adapters and presets; the progress of an addition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from gpupoold.api.schemas import MAX_DEVICES, AdditionInfo, Body, ErrorBody, ModelUsage, PaceText
from gpupoold.domain import DEFAULT_TBT_S, DEFAULT_TTFT_S, AdapterInfo, ModelDescription, Targets
from gpupoold.durations import GraphSizes, LoadStages
from gpupoold.latency.models import StoredLatency
from gpupoold.units import format_bytes, format_duration

MAX_PEERS = 16
PeerUrl = Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s/?#]+$")]

STAGE_WORDS = {
    "resolve": "finding the checkpoint",
    "download": "downloading",
    "check": "checking",
    "load": "loading",
    "spread": "serving; loading on further devices",
    "ready": "ready",
}


class _AddRequest(Body):
    name: str
    source: str | None = None
    revision: str | None = None
    check_only: bool = False


class AddModelRequest(_AddRequest):
    """``POST /models``; the answer is a stream of ``Progress`` lines.

    ``devices`` are chosen by hand for the model's engines; without any the scheduler chooses.
    With ``detach`` the stream ends after the checks, and the daemon goes on. With ``verify`` a
    model whose answers change by switches or migrations is not added. ``peers`` are addresses of
    the fleet's nodes that have the checkpoint.
    """

    peers: list[PeerUrl] = Field(default=[], max_length=MAX_PEERS)
    dtype: str = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    ttft_s: float = Field(default=DEFAULT_TTFT_S, gt=0, allow_inf_nan=False)
    tbt_s: float = Field(default=DEFAULT_TBT_S, gt=0, allow_inf_nan=False)
    aliases: list[str] = Field(default=[])
    engine: dict[str, str] = Field(default={})
    devices: list[int] = Field(default=[], max_length=MAX_DEVICES)
    pace: PaceText = ""
    detach: bool = False
    verify: bool = False


class AddAdapterRequest(_AddRequest):
    """Body of ``POST /adapters``: a LoRA adapter for the model ``base``.

    A target of None is the model's.
    """

    base: str
    ttft_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tbt_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class AddPresetRequest(Body):
    """Body of ``POST /presets``: a further name of the model ``base`` with other defaults.

    ``defaults`` has fields of a request by dotted names. A target of None is the model's.
    """

    name: str
    base: str
    defaults: dict[str, Any] = Field(default={})
    ttft_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tbt_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class SetModelRequest(Body):
    """Body of ``PATCH /models/{name}``; None keeps a value.

    ``engine`` replaces single options of the engine; None removes an option.
    """

    ttft_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tbt_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    pace: PaceText | None = None
    add_aliases: list[str] = Field(default=[])
    remove_aliases: list[str] = Field(default=[])
    engine: dict[str, str | None] = Field(default={})


class FoundInfo(Body):
    """A parser or a chat template that was found or given, None for none, and the reason."""

    name: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Targets, ModelDescription):
    """A registered model; once loaded, ``max_model_len`` is the engine's limit.

    ``latency`` has the latency measured last, None before; ``latency.model()`` predicts.
    ``latencies`` has the latencies on all kinds of device, also on groups of GPUs, ``engine_bytes``
    the measured memory of an engine outside the pages, without libraries that engines share.
    ``usage`` has the present memory and requests. ``usage``, the parsers and the chat template are
    present for a single model only. ``tasks`` are vLLM's names of the work that the loaded model
    does, for example ``generate`` or ``embed``.
    """

    adapters: tuple[AdapterInfo, ...] = ()
    state: str
    error: str
    architecture: str
    weight_bytes: int
    kv_bytes_per_token: int
    created_at: float
    latency: StoredLatency | None = None
    latencies: tuple[StoredLatency, ...] = ()
    engine_bytes: dict[str, int] = field(default_factory=dict)
    usage: ModelUsage | None = None
    tasks: tuple[str, ...] = ()
    tool_parser: FoundInfo | None = None
    reasoning_parser: FoundInfo | None = None
    chat_template: FoundInfo | None = None

    @property
    def generates(self) -> bool:
        """True unless the loaded model makes embeddings, scores or classes only."""
        return not self.tasks or "generate" in self.tasks


class Progress(Body):
    """A line of a long operation's stream (NDJSON).

    The last line has ``model`` or ``error``, or the stage ``detached`` if the daemon goes on
    without a reader. ``bytes_per_s`` is the rate of the last seconds, None if unknown. ``note`` is
    a remark for users.
    """

    stage: str
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    note: str = ""
    model: ModelInfo | None = None
    error: ErrorBody | None = None


def stage_text(progress: Progress | AdditionInfo) -> str:
    words = STAGE_WORDS.get(progress.stage, progress.stage)
    return f"{words} {format_bytes(progress.total_bytes)}" if progress.total_bytes else words


def amount_text(progress: Progress | AdditionInfo) -> str:
    """Return bytes, share, rate and remaining time as far as known, else nothing.

    For example ``3.1 GiB of 14.2 GiB, 22 %, 112 MiB/s, 102s left``.
    """
    done_bytes, total_bytes = progress.done_bytes, progress.total_bytes
    if done_bytes is None or not total_bytes:
        return ""
    text = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
    parts = (text, f"{100 * done_bytes // total_bytes} %", speed_text(progress))
    return ", ".join(part for part in parts if part)


def load_text(stages: LoadStages) -> str:
    """Return the time of a load, and the stages that took at least 50 ms.

    For example ``14.2s: build 2.1, read 6.0, snapshot 6.1``.
    """
    parts = [f"{name} {took_s:.1f}" for name, took_s in stages.by_name().items() if took_s >= 0.05]
    return ": ".join(filter(None, (format_duration(stages.total_s), ", ".join(parts))))


def graphs_text(graphs: GraphSizes) -> str:
    """Return how many sizes of batches have CUDA graphs, for example
    ``5 sizes by the load, 3 of 10 later in 1.20s``.
    """
    later = f"{graphs.num_late} of {graphs.num_late + graphs.num_left} later"
    took = f" in {format_duration(graphs.late_s)}" if graphs.num_late else ""
    return f"{graphs.num_first} sizes by the load, {later}{took}"


def speed_text(progress: Progress | AdditionInfo) -> str:
    """Return rate and remaining time as far as known, else nothing."""
    left_bytes = (progress.total_bytes or 0) - (progress.done_bytes or 0)
    if not progress.bytes_per_s or left_bytes <= 0:
        return ""
    left_s = max(1.0, float(round(left_bytes / progress.bytes_per_s)))
    return f"{format_bytes(progress.bytes_per_s)}/s, {format_duration(left_s)} left"
