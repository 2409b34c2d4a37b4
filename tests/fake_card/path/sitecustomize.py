"""Answers of models whose kernels do nothing: a token follows from the prompt and its place.

The fake card has this folder on Python's path, so that every process imports this at its start.
When vLLM's scheduler and the output of its model runner V2 are imported, they get made-up tokens
for what kernels would have left; everything around them is vLLM's.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Ids that all test tokenizers have, and that end no answer.
_FIRST_TOKEN, _NUM_TOKENS = 300, 1000
# A prompt that goes on with what was answered has the same beginning.
_SEED_TOKENS = 16


def made_up(prompt: Sequence[int] | None, place: int) -> int:
    """The token at this place of a request's text, the prompt included."""
    seed = zlib.crc32(repr(list(prompt or ())[:_SEED_TOKENS]).encode())
    return _FIRST_TOKEN + (seed + 37 * place) % _NUM_TOKENS


def _patch_output(module: Any) -> None:
    """One token for each request; which one, and whether it counts, the scheduler says."""
    real = module.AsyncOutput.get_output

    @functools.wraps(real)
    def get_output(self: Any) -> Any:
        self.sampled_token_ids[:] = 0
        self.num_sampled_tokens_np[:] = 1
        return real(self)

    module.AsyncOutput.get_output = get_output


def _patch_scheduler(module: Any) -> None:
    real = module.Scheduler.update_from_output

    @functools.wraps(real)
    def update_from_output(self: Any, scheduled: Any, output: Any) -> Any:
        if output.sampled_token_ids:
            for request_id, before in _computed_before(scheduled):
                request = self.requests.get(request_id)
                tokens = output.sampled_token_ids[output.req_id_to_index[request_id]]
                tokens.clear()
                after = before + scheduled.num_scheduled_tokens[request_id]
                if request is not None and after >= request.num_tokens:
                    tokens.append(made_up(request.prompt_token_ids, request.num_tokens))
        return real(self, scheduled, output)

    module.Scheduler.update_from_output = update_from_output


def _computed_before(scheduled: Any) -> list[tuple[str, int]]:
    new = [(one.req_id, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
    known = scheduled.scheduled_cached_reqs
    return new + list(zip(known.req_ids, known.num_computed_tokens, strict=True))


class _Finder(importlib.abc.MetaPathFinder):
    """Patches a module when it has been imported."""

    def __init__(self, name: str, patch: Callable[[Any], None]) -> None:
        self._name = name
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See the base class."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


for _name, _patch in (
    ("vllm.v1.worker.gpu.async_utils", _patch_output),
    ("vllm.v1.core.sched.scheduler", _patch_scheduler),
):
    sys.meta_path.insert(0, _Finder(_name, _patch))
