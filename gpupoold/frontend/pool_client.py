"""vLLM's engine client over the daemon: requests go to the daemon, outputs come back.

One per model, on the event loop. ``AsyncLLM`` calls the client by duck typing; the module uses only
names of vLLM's methods and of a few request fields.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec

from gpupoold.frontend.callers import cache_salt
from gpupoold.frontend.fleet_calls import take_output_so_far, why_impossible
from gpupoold.frontend.pacing import Pacer
from gpupoold.frontend.request_ids import sample_number
from gpupoold.frontend.vocabulary import counts_prompt, drop_beyond, take_rows
from gpupoold.stats.histogram import Histogram
from gpupoold.wire.channel import MAX_FRAME_BYTES
from gpupoold.wire.continuation import OutputSoFar
from gpupoold.wire.messages import AbortRequests, AddRequest, RequestProgress, StepOutputs

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 4
"""Limit of an encoded request in bytes: a message has room for the request and all its tokens."""


@dataclass(frozen=True, slots=True)
class EngineCodec:
    """The engine's serialiser, and errors of its API layer.

    ``encode`` takes a request, ``decode`` returns an engine's outputs, ``make_outputs`` those of a
    device without an engine, and ``repeat`` those of a request whose tokens are known; ``join``
    merges several in order. ``cached_tokens`` returns the prompt tokens that were in the prefix
    cache, of requests with a first output; ``put_in_step`` makes outputs of the outputs of single
    requests. ``is_streamed`` returns whether the client of a request gets its tokens one by one.
    ``unavailable`` makes an error that clients see as 503, ``unsupported`` as 400.
    """

    encode: Callable[[Any], Sequence[bytes | bytearray | memoryview]]
    decode: Callable[[Sequence[bytes]], Any]
    make_outputs: Callable[[Sequence[RequestProgress]], Any]
    repeat: Callable[[Any, OutputSoFar], list[Any]]
    join: Callable[[Sequence[Any]], Any]
    cached_tokens: Callable[[Any], Iterable[tuple[str, int]]]
    put_in_step: Callable[[list[Any]], Any]
    is_streamed: Callable[[Any], bool]
    unavailable: Callable[[str], Exception]
    unsupported: Callable[[str], Exception]


class SlowOutputs(Protocol):
    """Outputs that take the event loop long, and are prepared in slices; true while it has some."""

    def __bool__(self) -> bool: ...

    def hold(self, outputs: list[Any]) -> list[Any]:
        """Take slow outputs and what must follow them; return the others."""

    def advance(self) -> list[Any]:
        """Do a slice of work; return the outputs that are due after it."""


class EngineResources:
    """``AsyncLLM``'s view of the engine process, which never counts as dead."""

    engine_dead = False


class EngineLimits(NamedTuple):
    """What a model's engine does: its tasks, the TBT target, and the ids of its tokens.

    ``vocab_size`` bounds the tokens of answers, ``num_embeddings`` those of prompts.
    """

    model: str
    supported_tasks: tuple[str, ...]
    tbt_s: float
    vocab_size: int
    num_embeddings: int


class PoolClient:
    """The engine of one model from its API layer's view."""

    def __init__(
        self,
        limits: EngineLimits,
        codec: EngineCodec,
        send: Callable[[msgspec.Struct], None],
        on_unreadable: Callable[[list[str]], None],
        on_prefilled: Callable[[str, int], None],
    ) -> None:
        """``on_unreadable`` gets the ids whose outputs could not be decoded, ``on_prefilled`` a
        request's id and its cached tokens. ``slow_outputs`` may be set before the first request.
        """
        self.slow_outputs: SlowOutputs | None = None
        self.resources = EngineResources()
        self.engine_ranks_managed = [0]
        self._limits = limits
        self._codec = codec
        self._send = send
        self._on_unreadable = on_unreadable
        self._on_prefilled = on_prefilled
        self._steps: asyncio.Queue[StepOutputs | list[Any]] = asyncio.Queue()
        self._pacer = Pacer(self._steps.put_nowait, limits.tbt_s)
        self._stopped_because: str | None = None

    def push(self, outputs: StepOutputs) -> None:
        """Store one step's outputs, decoded when the API layer reads them."""
        self._steps.put_nowait(outputs)

    def stop(self, message: str) -> None:
        """Refuse requests from now on, with this message."""
        self._stopped_because = message

    @property
    def stopped(self) -> bool:
        return self._stopped_because is not None

    async def add_request_async(self, request: Any) -> None:
        """Send a request to the daemon.

        Raises:
            Exception: ``codec.unavailable`` after ``stop``,
                ``codec.unsupported`` for requests without token ids, with ids that the model does
                not have, and for too large ones.
        """
        if self._stopped_because is not None:
            raise self._codec.unavailable(self._stopped_because)
        params, limits = request.sampling_params, self._limits
        if request.prompt_token_ids is None:
            raise self._codec.unsupported("gpupool serves requests with token ids only")
        if (token_id := take_rows(request, limits.num_embeddings)) is not None:
            raise self._codec.unsupported(
                f"Token id {token_id} of the prompt is beyond the model's vocabulary of "
                f"{limits.num_embeddings:,} tokens; the tokenizer of {limits.model} has more "
                "tokens than its weights."
            )
        prompt = request.prompt_token_ids
        if params is not None:
            drop_beyond(params, limits.vocab_size)
            may_be_beyond = limits.num_embeddings > limits.vocab_size and counts_prompt(params)
            if may_be_beyond and (largest := max(prompt, default=0)) >= limits.vocab_size:
                raise self._codec.unsupported(
                    "Penalties and prompt_logprobs count the tokens of the prompt, and token id "
                    f"{largest} is beyond the {limits.vocab_size:,} that an answer of "
                    f"{limits.model} can have. Leave them out."
                )
        request.cache_salt = cache_salt(request.cache_salt)
        frames = [bytes(frame) for frame in self._codec.encode(request)]
        num_bytes = sum(map(len, frames))
        if num_bytes > MAX_REQUEST_BYTES:
            raise self._codec.unsupported(
                f"The request takes {num_bytes:,} bytes for the engine, more than the limit of "
                f"{MAX_REQUEST_BYTES:,}. Send fewer or smaller images, or a shorter prompt."
            )
        message = AddRequest(
            model=limits.model,
            request_id=request.request_id,
            arrival_s=time.monotonic(),
            num_prompt_tokens=len(prompt),
            max_tokens=1 if params is None else params.max_tokens or 0,  # a result is one item
            frames=frames,
            served_name="" if request.lora_request is None else request.lora_request.lora_name,
        )
        so_far = take_output_so_far(sample_number(request.request_id))
        if so_far is not None and not self._continue(request, message, so_far):
            return
        if self._codec.is_streamed(request):
            self._pacer.begin(request.request_id)
        self._send(message)

    def _continue(self, request: Any, message: AddRequest, so_far: OutputSoFar) -> bool:
        """Put the tokens of an earlier answer before those of the engine.

        Returns whether the engine has tokens to make.

        Raises:
            Exception: ``codec.unsupported``, the answer cannot be continued.
        """
        if reason := why_impossible(so_far, message.max_tokens, self._limits.vocab_size):
            raise self._codec.unsupported(f"gpupool: {reason}")
        self._steps.put_nowait(self._codec.repeat(request, so_far))
        message.output_token_ids = list(so_far.token_ids)
        return so_far.finish_reason is None

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Report to the daemon that these requests' clients have left."""
        self.abort(list(request_ids))

    def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._pacer.end(request_ids)
            self._send(AbortRequests(model=self._limits.model, request_ids=request_ids))

    def take_paced_gaps(self) -> Histogram:
        """Return the times between tokens of paced streams since the last call."""
        return self._pacer.take_gaps()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the waiting outputs of failed requests."""
        self._pacer.end(request_ids)

    async def get_output_async(self) -> Any:
        """Return the outputs of the next step; of all waiting steps merged.

        Outputs that ``slow_outputs`` holds back follow later.
        """
        while True:
            if self.slow_outputs:
                await asyncio.sleep(0)
                if due := self.slow_outputs.advance():
                    return self._codec.put_in_step(due)
                if self._steps.empty():
                    continue
            steps = [await self._steps.get()]
            while not self._steps.empty():
                steps.append(self._steps.get_nowait())
            read = [outputs for outputs in map(self._read, steps) if outputs is not None]
            if not read:
                continue
            outputs = self._codec.join(read) if len(read) > 1 else read[0]
            if self.slow_outputs is None:
                return outputs
            if due := self.slow_outputs.hold(outputs.outputs):
                outputs.outputs = due
                return outputs

    def _read(self, step: StepOutputs | list[Any]) -> Any | None:
        """Return a step's outputs due now, or outputs released by the pacer."""
        if isinstance(step, list):
            return self._codec.put_in_step(step)
        try:
            if step.frames:
                outputs = self._codec.decode(step.frames)
                for request_id, num_cached in self._codec.cached_tokens(outputs):
                    self._on_prefilled(request_id, num_cached)
            else:
                outputs = self._codec.make_outputs(step.progress)
            if not self._pacer.is_active:
                return outputs
            due = self._pacer.hold(outputs.outputs)
            return self._codec.put_in_step(due) if due else None
        except Exception:
            logger.exception("unreadable outputs of %s", self._limits.model)
            self._on_unreadable([progress.request_id for progress in step.progress])
            return None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the tasks that the model's engine reported."""
        return self._limits.supported_tasks

    def dp_engines_running(self) -> bool:
        """Data parallelism is the pool's business, not the API layer's."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the engine belongs to a worker."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error for an engine operation that the pool does not offer."""
        raise AttributeError(f"{name} is not available through gpupool")
