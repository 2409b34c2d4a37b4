"""The base of messages, and their parts: models, requests, switches and memory.

Instants that end in ``_s`` are ``time.monotonic()`` of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpupoold.domain import Adapter, MemoryUse, ModelSpec, Preset, Switch


@dataclass(frozen=True, kw_only=True)
class ModelToLoad(ModelSpec):
    """A model with the settings for building its vLLM configuration.

    ``max_images`` is per prompt, ``max_image_pixels`` for all images of an HTTP request.
    """

    allow_remote_code: bool = False
    media_hosts: tuple[str, ...] = ()
    max_images: int = 16
    max_image_pixels: int = 32_000_000


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model, for frontends and the registry.

    ``slot_bytes`` are the device bytes of the adapters' slots, beside ``weight_bytes``.
    ``adapter_problems`` has the reasons why adapters of the order were not loaded, by name.
    """

    name: str
    architecture: str
    max_model_len: int
    dtype: str
    block_size: int
    num_gpu_blocks: int
    weight_bytes: int
    kv_bytes_per_token: int
    supported_tasks: tuple[str, ...]
    slot_bytes: int = 0
    adapter_problems: dict[str, str] = {}

    @property
    def generates(self) -> bool:
        """True if the model makes tokens; False for a pooling model."""
        return "generate" in self.supported_tasks


class EngineMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of an engine outside the device's pages, measured around the load.

    ``device_bytes`` are taken from the device's reserve, ``host_bytes`` are private and
    pinned memory of the worker. Both are the same memory on an emulated device.
    """

    device_bytes: int = 0
    host_bytes: int = 0


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Speculative decoding: drafts, the tokens in the drafts, and the tokens that were accepted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens of an answer in a step with a draft, None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


class RequestProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's share of a step: new token ids, and the reason if the request ended.

    ``has_result``: the step made the result of a pooling request (an embedding or scores).
    ``num_cached_tokens`` of the prompt had KV before; None in later steps than that of the prompt.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    has_result: bool = False
    num_cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of new tokens; a pooling result counts as one."""
        return len(self.new_token_ids) + self.has_result


class FirstToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request with a first token: its device, and the stages of the time until the token.

    ``switching_s`` includes the time of KV; see :class:`gpupoold.durations.RequestStages`.
    """

    request_id: str
    device: int
    loading_s: float
    queueing_s: float
    switching_s: float
    computing_s: float


class RequestWait(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The wait of a request without a first token (``scheduling.wait_estimate.Wait``)."""

    request_id: str
    place: int
    first_token_in_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord(Switch):
    """A switch that began at ``at_s``.

    ``prefetched_bytes`` counts the weights that a prefetch had loaded or was loading at the start;
    ``weight_bytes`` excludes prefetched weights. ``late_weight_bytes`` counts the weights that
    arrived after the end, during the first step.
    """

    at_s: float
    prefetched_bytes: int = 0
    late_weight_bytes: int = 0


class KvTransfer(msgspec.Struct, frozen=True, array_like=True):
    """KV and state of a request's first ``num_computed_tokens`` tokens, in ``num_blocks`` blocks.

    The blocks are those that the next tokens need, KV cache group by KV cache group. Their bytes,
    row by row, are at ``(offset, num_bytes)`` of the host cache of worker ``source``. The message
    carries an eventfd that signals the arrival of the bytes (:mod:`gpupoold.memory.transfers`).
    """

    transfer_id: str
    source: int
    num_blocks: int
    offsets: list[tuple[int, int]]
    num_computed_tokens: int


class LoadProgress(msgspec.Struct, frozen=True):
    """The load of a model on a worker, beside the turns, since ``began_s``.

    ``stage`` completes "the worker ..."; ``num_waiting`` loads follow. While ``holds_turns``, steps
    wait for the load.
    """

    model: str
    began_s: float
    stage: str
    num_waiting: int = 0
    holds_turns: bool = False


@dataclass(kw_only=True)
class ModelMemory(MemoryUse):
    """A model's memory on one worker, and its requests there."""

    model: str
    num_live: int
    num_waiting: int


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``/v1/models``; ``state`` is a ``ModelState``. ``parent`` is the model of a
    preset or adapter, which has a row of its own.

    Clients of a model that is not ready should retry after ``retry_after_s``, or at ``retry_at_s``
    (on the monotonic clock) if that is later. ``pace`` is the pace of streams, empty for none.
    """

    name: str
    aliases: tuple[str, ...]
    state: str
    created_at: float
    reason: str = ""
    retry_after_s: float = 1.0
    retry_at_s: float = 0.0
    max_model_len: int | None = None
    presets: tuple[Preset, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    parent: str = ""
    pace: str = ""

    @property
    def preset(self) -> Preset | None:
        return self.presets[0] if self.parent and self.presets else None


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the class name is the tag on the wire."""
