"""vLLM's engine client over the daemon: requests go to the daemon, outputs come back.

One per model, on the event loop. ``AsyncLLM`` calls the client by duck typing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gpupoold.frontend.callers import cache_salt, take_output_so_far, why_impossible
from gpupoold.frontend.gates import Pacer
from gpupoold.frontend.request_context import sample_number
from gpupoold.frontend.vocabulary import PromptLogprobs, counts_prompt, drop_beyond, take_rows
from gpupoold.wire.channel import MAX_FRAME_BYTES
from gpupoold.wire.continuation import OutputSoFar
from gpupoold.wire.messages import AbortRequests, AddRequest, RequestProgress, StepOutputs

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 4
"""Limit of an encoded request in bytes: a message has room for the request and all its tokens."""

# For the event loop: vLLM's serialisers are not thread-safe.
_encoder = MsgpackEncoder()
_decode = MsgpackDecoder(EngineCoreOutputs).decode

MAX_STEPS_APART = 1024
"""Steps that wait for the reader of a stream; further steps are joined, which bounds memory."""

# Parsers of one text at a time that take any number of tokens, by tests with recorded answers.
_PARSERS_OF_JOINED_STEPS = frozenset(
    ("apertus", "granite4", "hermes", "lfm2", "olmo3", "openai", "pythonic", "qwen3_json")
)

_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


class RequestLost(GracefulHTTPError, GenerationError):  # type: ignore[misc, unused-ignore]
    """The pool cannot answer a request; clients see the message and the status, by default 503.

    ``AsyncLLM.generate`` passes the first base on unchanged, the streaming endpoints turn the
    second into an error event. ``code`` is the error's code if different from the status.
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

        Returns whether the engine has tokens to make. Raises VLLMValidationError: the answer cannot
        be continued.
        """
        if reason := why_impossible(so_far, message.max_tokens, self._limits.vocab_size):
            raise VLLMValidationError(f"gpupool: {reason}")
        self._steps.put_nowait(repeat_outputs(request, so_far))
        message.output_token_ids = list(so_far.token_ids)
        return so_far.finish_reason is None

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
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


def reads_joined_steps(tool_parser: str | None) -> bool:
    """Return whether a tool parser of vLLM takes the tokens of several steps at once."""
    if tool_parser is None or tool_parser in _PARSERS_OF_JOINED_STEPS:
        return True
    return bool(ToolParserManager.get_tool_parser(tool_parser).engine_based_streaming)


def join_steps(steps: Sequence[EngineCoreOutputs]) -> EngineCoreOutputs:
    """Join the outputs of several steps into one step with several tokens per request.

    Speculative decoding gives such steps, so vLLM handles them. Outputs with more than tokens stay
    separate, next to the others of their request: vLLM's collector merges them.
    """
    by_request: dict[str, list[EngineCoreOutput]] = {}
    with_tokens_only: dict[str, EngineCoreOutput] = {}  # the request's latest output, if eligible
    for step in steps:
        for output in step.outputs:
            request_id = output.request_id
            earlier = with_tokens_only.get(request_id)
            if any(value is not None for value in _beside_tokens(output)):
                with_tokens_only.pop(request_id, None)
            elif earlier is None:
                with_tokens_only[request_id] = output
            else:
                # A new list, because a retired API may still use the old list.
                earlier.new_token_ids = earlier.new_token_ids + output.new_token_ids
                earlier.finish_reason = output.finish_reason
                earlier.stop_reason = output.stop_reason
                continue
            by_request.setdefault(request_id, []).append(output)
    joined = steps[-1]
    joined.outputs = [output for outputs in by_request.values() for output in outputs]
    return joined


_beside_tokens = operator.attrgetter(
    *sorted(
        set(EngineCoreOutput.__struct_fields__)
        - {"request_id", "new_token_ids", "finish_reason", "stop_reason", "num_nans_in_logits"}
    )
)


def put_in_a_row(steps: Sequence[EngineCoreOutputs]) -> EngineCoreOutputs:
    """Return one step with the outputs of several steps, one after the other."""
    joined = steps[-1]
    joined.outputs = [output for step in steps for output in step.outputs]
    return joined


class StepCollector(RequestOutputCollector):  # type: ignore[misc, unused-ignore]
    """The queue of a stream, which returns the outputs of each step by themselves.

    vLLM's own queue merges what its reader has not taken yet. A frontend that is behind
    joins the waiting steps of a request, which saves time. Some of vLLM's tool parsers lose a call
    if several of its tokens arrive at once.
    """

    steps: deque[Any]

    def put(self, output: Any) -> None:
        """Add the outputs of a step; an error replaces all that waits."""
        if isinstance(output, Exception):
            self.steps.clear()
            super().put(output)
        elif self.output is None:
            super().put(output)
        elif isinstance(self.output, Exception):
            return
        elif len(self.steps) < MAX_STEPS_APART:
            self.steps.append(output)
        else:
            self.steps[-1].add(output, aggregate=self.aggregate)

    async def get(self) -> Any:
        output = await super().get()
        self._bring_next()
        return output

    def get_nowait(self) -> Any:
        output = super().get_nowait()
        self._bring_next()
        return output

    def _bring_next(self) -> None:
        if self.output is None and self.steps:
            super().put(self.steps.popleft())


def keep_steps_apart(queue: RequestOutputCollector) -> RequestOutputCollector:
    """Turn the queue of a stream, which vLLM has just made, into a ``StepCollector``.

    vLLM has no plug point for the queue, and the output processor has the queue already.
    """
    if queue.aggregate:
        queue.__class__ = StepCollector
        queue.steps = deque()
    return queue


def make_outputs(progress: Sequence[RequestProgress]) -> EngineCoreOutputs:
    """Return outputs as an engine would have made for these tokens."""
    outputs = [
        EngineCoreOutput(
            item.request_id,
            item.new_token_ids,
            finish_reason=_FINISH_REASONS[item.finish_reason] if item.finish_reason else None,
        )
        for item in progress
    ]
    return EngineCoreOutputs(outputs=outputs)


def repeat_outputs(request: EngineCoreRequest, so_far: OutputSoFar) -> list[EngineCoreOutput]:
    """Return the outputs of a request whose tokens are known, one for each token.

    The log-probabilities are 0: the fleet's entrance drops those of repeated tokens.
    """
    params = request.sampling_params
    found = [EngineCoreOutput(request.request_id, [token_id]) for token_id in so_far.token_ids]
    if params is not None and params.num_logprobs is not None:
        for output in found:
            ids = np.array([output.new_token_ids])
            output.new_logprobs = LogprobsLists(ids, np.zeros((1, 1)), np.array([1]))
    if so_far.finish_reason:
        found[-1].finish_reason = _FINISH_REASONS[so_far.finish_reason]
    return found
