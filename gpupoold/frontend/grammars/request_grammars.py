"""Checks of a model's grammars before the request reaches the pool.

vLLM 0.32.0 validates a grammar on the event loop, in ``InputProcessor.process_inputs`` and while
parsing a body. Both are replaced: the grammar checker validates in another process.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import choice_as_grammar

from gpupoold.frontend.callers import current_key_id
from gpupoold.frontend.client_answer import for_clients
from gpupoold.frontend.errors import ApiError, bad_request, over_rate
from gpupoold.frontend.grammars.bounds import OverBound, check_constraint
from gpupoold.frontend.grammars.messages import GrammarVerdict
from gpupoold.frontend.grammars.vetting import GrammarVetting, TooManyGrammars
from gpupoold.frontend.vllm_bounds import refused
from gpupoold.grammar_backends import grammar_digest
from gpupoold.wire.messages import LoadedModel, ModelToLoad

_FIELD = "structured_outputs"
_RETRY_S = 2.0
_mount_ids = itertools.count(1)


class ModelGrammars:
    """Checks the grammars of one mounted model's requests."""

    def __init__(self, vetting: GrammarVetting, model: ModelToLoad, loaded: LoadedModel) -> None:
        self._vetting = vetting
        self._model = model
        self._loaded = loaded
        self._mount_id = next(_mount_ids)

    async def vetted(self, params: Any) -> Any:
        """Return the parameters with their grammar in the form of vLLM's validation.

        Raises:
            VLLMValidationError: the grammar may not be used, or cannot be checked now; the answer
                is refused with the reason.
        """
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return params
        structured = params.structured_outputs
        parts = {
            field.name: value
            for field in dataclasses.fields(structured)
            if field.init and (value := getattr(structured, field.name)) not in (None, False)
        }
        try:
            constraint = check_constraint(parts)
            verdict = await self._vetting.verdict(
                self._mount_id, self._model, self._loaded, constraint, current_key_id()
            )
        except OverBound as error:
            raise refused(bad_request(f"{error}.", param=error.field)) from error
        except TooManyGrammars as error:
            text = "Too many new grammars (schemas, patterns, choices, tools) wait to be checked."
            raise refused(over_rate(text, _RETRY_S)) from error
        if verdict.outcome == "unknown":
            reason = for_clients(verdict.reason) or "the checker has ended"
            text = f"The grammar cannot be checked now: {reason}."
            raise refused(ApiError(503, text, retry_after_s=_RETRY_S))
        if verdict.outcome == "refused":
            reason = for_clients(verdict.reason)
            raise refused(bad_request(f"The grammar cannot be used: {reason}", param=_FIELD))
        params = copy.copy(params)
        params.structured_outputs = _validated(structured, verdict)
        if self._vetting.has_convictions:
            digest = grammar_digest(params.structured_outputs)
            if reason := self._vetting.conviction(self._model.name, current_key_id(), digest):
                raise refused(bad_request(reason, param=_FIELD))
        return params


def _validated(
    structured: StructuredOutputsParams, verdict: GrammarVerdict
) -> StructuredOutputsParams:
    if verdict.backend == "xgrammar" and structured.choice:
        grammar = choice_as_grammar(structured.choice)
        validated = dataclasses.replace(structured, choice=None, grammar=grammar)
    else:
        validated = dataclasses.replace(structured)
    validated._backend = verdict.backend
    validated._backend_was_auto = True
    return validated


def keep_grammars_off_the_loop() -> None:
    """Replace xgrammar's native validation in this process.

    While parsing a body, vLLM validates structural tags, and asks whether xgrammar supports the
    schemas of tools. The request's check covers both.
    """
    backend_xgrammar.validate_xgrammar_grammar = _check_features  # type: ignore[assignment]


def _check_features(params: SamplingParams) -> None:
    structured = params.structured_outputs
    if structured is None or not structured.json:
        return
    schema = structured.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if isinstance(schema, Mapping) and backend_xgrammar.has_xgrammar_unsupported_json_features(
        dict(schema)
    ):
        raise VLLMValidationError("xgrammar does not support the JSON schema")
