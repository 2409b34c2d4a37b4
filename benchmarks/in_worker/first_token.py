"""Time of the first token after a switch from host memory, with and without an early start."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.in_worker import figures
from benchmarks.in_worker.idle import crowded
from gpupoold.errors import Failed, Refused

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine
    from gpupoold.worker.turns.loop import TurnLoop

_WARM_UP = 2
_MAX_STEPS = 1000
_numbers = itertools.count(1)


def bench_first_tokens(
    loop: TurnLoop, engines: Sequence[ModelEngine], rounds: int, prompts: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row per prompt length in tokens.

    ``whole_p50_s``: the turn begins with all weights present. ``early_p50_s``: as soon as possible;
    absent if no model starts early. ``prefill_p50_s``: the model was resident. Each switch evicts
    the other models, because only one fits into the pages left; the times alternate.

    Raises:
        Refused: a prompt is too long.
    """
    longest = min(engine.info.max_model_len for engine in engines) - 1
    if prompts and max(prompts) > longest:
        hint = f"ask for at most {longest} tokens"
        raise Refused(f"a prompt of {max(prompts)} tokens is too long", hint)
    return [_row(loop, engines, rounds, num_tokens) for num_tokens in prompts]


def _row(
    loop: TurnLoop, engines: Sequence[ModelEngine], rounds: int, num_tokens: int
) -> dict[str, Any]:
    whole_s, early_s, prefill_s = list[float](), list[float](), list[float]()
    late_bytes = 0
    for index in range(_WARM_UP + rounds):
        for engine in engines:
            others = [one for one in engines if one is not engine]
            start_bytes = engine.weights.start_bytes
            engine.weights.start_bytes = engine.weights.num_bytes
            try:
                whole = _timed(loop, engine, num_tokens, _switch(loop, engine, others))
            finally:
                engine.weights.start_bytes = start_bytes
            prefill = _timed(loop, engine, num_tokens, lambda: None)
            if start_bytes < engine.weights.num_bytes:
                early = _timed(loop, engine, num_tokens, _switch(loop, engine, others))
                early_s += [early] if index >= _WARM_UP else []
                late_bytes = max(late_bytes, engine.weights.num_bytes - start_bytes)
            if index >= _WARM_UP:
                whole_s.append(whole)
                prefill_s.append(prefill)
    row = {
        "prompt_tokens": num_tokens,
        "samples": len(whole_s),
        "whole_p50_s": figures.p50(whole_s),
        "prefill_p50_s": figures.p50(prefill_s),
    }
    early_row = {"early_p50_s": figures.p50(early_s), "late_bytes": late_bytes} if early_s else {}
    return row | early_row


def _switch(
    loop: TurnLoop, engine: ModelEngine, others: Sequence[ModelEngine]
) -> Callable[[], None]:
    """Prepare a switch to ``engine``, which is then in host memory only; return the switch."""
    loop.residency.page_out(engine.name)
    for other in others:
        loop.residency.make_resident(other.name)

    def switch() -> None:
        with crowded(loop, engine):
            loop.switch_to(engine.name)

    return switch


def _timed(
    loop: TurnLoop, engine: ModelEngine, num_tokens: int, switch: Callable[[], None]
) -> float:
    """Return the seconds of a switch and of the prompt's first token."""
    request_id = f"first-token-{next(_numbers)}"
    engine.add_synthetic(request_id, num_tokens, 1)
    started_s = time.perf_counter()
    switch()
    for _ in range(_MAX_STEPS):
        loop.residency.ensure_kv(engine.name)
        if any(item.num_tokens for item in engine.step()):
            return time.perf_counter() - started_s
    raise Failed(f"{engine.name} makes no token")
