"""Outputs of engine steps on their way to the streams of clients: joined, or one by one.

A frontend that is behind joins the waiting steps of a request, which saves time. Some of vLLM's
tool parsers lose a call if several of its tokens arrive at once.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from gpupoold.wire.continuation import OutputSoFar
from gpupoold.wire.messages import RequestProgress

MAX_STEPS_APART = 1024
"""Steps that wait for the reader of a stream; further steps are joined, which bounds memory."""

# Parsers of one text at a time that take any number of tokens, by tests with recorded answers.
_PARSERS_OF_JOINED_STEPS = frozenset(
    ("apertus", "granite4", "hermes", "lfm2", "olmo3", "openai", "pythonic", "qwen3_json")
)

_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


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

    vLLM's own queue merges what its reader has not taken yet.
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
            one.request_id,
            one.new_token_ids,
            finish_reason=_FINISH_REASONS[one.finish_reason] if one.finish_reason else None,
        )
        for one in progress
    ]
    return EngineCoreOutputs(outputs=outputs)


def repeat_outputs(request: EngineCoreRequest, so_far: OutputSoFar) -> list[EngineCoreOutput]:
    """Return the outputs of a request whose tokens are known, one for each token.

    The log-probabilities are 0: the fleet's entrance drops those of repeated tokens.
    """
    params = request.sampling_params
    found = [EngineCoreOutput(request.request_id, [token_id]) for token_id in so_far.token_ids]
    if params is not None and params.num_logprobs is not None:
        for one in found:
            ids = np.array([one.new_token_ids])
            one.new_logprobs = LogprobsLists(ids, np.zeros((1, 1)), np.array([1]))
    if so_far.finish_reason:
        found[-1].finish_reason = _FINISH_REASONS[so_far.finish_reason]
    return found
