"""vLLM's engine client over the daemon: requests go to the daemon, outputs come back.

One per model, on the event loop. ``AsyncLLM`` calls the client by duck typing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import NamedTuple, NoReturn

import msgspec
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gpupoold.frontend.callers import cache_salt
from gpupoold.frontend.fleet_calls import take_output_so_far, why_impossible
from gpupoold.frontend.logprobs import PromptLogprobs
from gpupoold.frontend.pacing import Pacer
from gpupoold.frontend.request_ids import sample_number
from gpupoold.frontend.step_outputs import join_steps, make_outputs, put_in_a_row, repeat_outputs
from gpupoold.frontend.vocabulary import counts_prompt, drop_beyond, take_rows
from gpupoold.wire.channel import MAX_FRAME_BYTES
from gpupoold.wire.continuation import OutputSoFar
from gpupoold.wire.messages import AbortRequests, AddRequest, StepOutputs

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 4
"""Limit of an encoded request in bytes: a message has room for the request and all its tokens."""

# For the event loop: vLLM's serialisers are not thread-safe.
_encoder = MsgpackEncoder()
_decode = MsgpackDecoder(EngineCoreOutputs).decode


class RequestLost(GracefulHTTPError, GenerationError):  # type: ignore[misc, unused-ignore]
    """The pool cannot answer a request; clients see the message and the status, by default 503.

    ``AsyncLLM.generate`` passes the first base on unchanged, the streaming
    endpoints turn the second into an error event. ``code`` is the error's code if different from
    the status.
    """

    def __init__(
        self, message: str, status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE, code: str = ""
    ) -> None:
        super().__init__(message, status)
        self.status_code = status
        self.code = code


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
        send: Callable[[msgspec.Struct], None],
        on_unreadable: Callable[[list[str]], None],
        on_prefilled: Callable[[str, int], None],
        *,
        joins: bool,
    ) -> None:
        """``on_unreadable`` gets the ids whose outputs could not be decoded, ``on_prefilled`` a
        request's id and its cached tokens. ``slow_outputs`` may be set before the first request;
        with ``joins`` waiting steps become one.
        """
        self.slow_outputs: PromptLogprobs | None = None
        self.resources = EngineResources()
        self.engine_ranks_managed = [0]
        self._limits = limits
        self._send = send
        self._on_unreadable = on_unreadable
        self._on_prefilled = on_prefilled
        self._join = join_steps if joins else put_in_a_row
        self._steps: asyncio.Queue[StepOutputs | list[EngineCoreOutput]] = asyncio.Queue()
        self.pacer = Pacer(self._steps.put_nowait, limits.tbt_s)
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

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request to the daemon.

        Raises:
            RequestLost: after ``stop``.
            VLLMValidationError: the request has no token ids, ids that the model does not have, or
                is too large.
        """
        if self._stopped_because is not None:
            raise RequestLost(self._stopped_because)
        params, limits = request.sampling_params, self._limits
        if request.prompt_token_ids is None:
            raise VLLMValidationError("gpupool serves requests with token ids only")
        if (token_id := take_rows(request, limits.num_embeddings)) is not None:
            raise VLLMValidationError(
                f"Token id {token_id} of the prompt is beyond the model's vocabulary of "
                f"{limits.num_embeddings:,} tokens; the tokenizer of {limits.model} has more "
                "tokens than its weights."
            )
        prompt = request.prompt_token_ids
        if params is not None:
            drop_beyond(params, limits.vocab_size)
            may_be_beyond = limits.num_embeddings > limits.vocab_size and counts_prompt(params)
            if may_be_beyond and (largest := max(prompt, default=0)) >= limits.vocab_size:
                raise VLLMValidationError(
                    "Penalties and prompt_logprobs count the tokens of the prompt, and token id "
                    f"{largest} is beyond the {limits.vocab_size:,} that an answer of "
                    f"{limits.model} can have. Leave them out."
                )
        request.cache_salt = cache_salt(request.cache_salt)
        frames = _encoded(request)
        num_bytes = sum(map(len, frames))
        if num_bytes > MAX_REQUEST_BYTES:
            raise VLLMValidationError(
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
        if params is not None and params.output_kind is RequestOutputKind.DELTA:
            self.pacer.begin(request.request_id)
        self._send(message)

    def _continue(
        self, request: EngineCoreRequest, message: AddRequest, so_far: OutputSoFar
    ) -> bool:
        """Put the tokens of an earlier answer before those of the engine.

        Returns whether the engine has tokens to make.

        Raises:
            VLLMValidationError: the answer cannot be continued.
        """
        if reason := why_impossible(so_far, message.max_tokens, self._limits.vocab_size):
            raise VLLMValidationError(f"gpupool: {reason}")
        self._steps.put_nowait(repeat_outputs(request, so_far))
        message.output_token_ids = list(so_far.token_ids)
        return so_far.finish_reason is None

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Report to the daemon that these requests' clients have left."""
        self.abort(list(request_ids))

    def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self.pacer.end(request_ids)
            self._send(AbortRequests(model=self._limits.model, request_ids=request_ids))

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the outputs of the next step; of all waiting steps merged.

        Outputs that ``slow_outputs`` holds back follow later.
        """
        while True:
            if self.slow_outputs:
                await asyncio.sleep(0)
                if due := self.slow_outputs.advance():
                    return EngineCoreOutputs(outputs=due)
                if self._steps.empty():
                    continue
            steps = [await self._steps.get()]
            while not self._steps.empty():
                steps.append(self._steps.get_nowait())
            read = [outputs for outputs in map(self._read, steps) if outputs is not None]
            if not read:
                continue
            outputs = self._join(read) if len(read) > 1 else read[0]
            if self.slow_outputs is None:
                return outputs
            if due := self.slow_outputs.hold(outputs.outputs):
                outputs.outputs = due
                return outputs

    def _read(self, step: StepOutputs | list[EngineCoreOutput]) -> EngineCoreOutputs | None:
        """Return a step's outputs due now, or outputs released by the pacer."""
        if isinstance(step, list):
            return EngineCoreOutputs(outputs=step)
        try:
            if step.frames:
                outputs = _decode(step.frames)
                for output in outputs.outputs:
                    if (prefilled := output.prefill_stats) is not None:
                        self._on_prefilled(output.request_id, prefilled.num_cached_tokens)
            else:
                outputs = make_outputs(step.progress)
            if not self.pacer.is_active:
                return outputs
            due = self.pacer.hold(outputs.outputs)
            return EngineCoreOutputs(outputs=due) if due else None
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


def _encoded(request: EngineCoreRequest) -> list[bytes]:
    """Encode a request without the client's texts that engines do not use.

    The left-out texts are its id, its session, and parameters of absent extensions.
    """
    sent = copy.copy(request)
    sent.external_req_id = sent.session_id = sent.trace_headers = sent.kv_hints = None
    if sent.sampling_params is not None and sent.sampling_params.extra_args:
        sent.sampling_params = copy.copy(sent.sampling_params)
        sent.sampling_params.extra_args = None
    return [bytes(frame) for frame in _encoder.encode(sent)]
