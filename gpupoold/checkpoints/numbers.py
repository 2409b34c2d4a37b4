"""The numbers of a checkpoint's configuration: finite, in range, and held against its tensors.

An engine builds what the numbers say, module by module, before it compares anything with the
weights. A number that is not finite makes every answer of the model nonsense, without an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupoold.checkpoints.tensor_file import TensorEntry
from gpupoold.errors import Refused

MAX_POSITIONS = 1 << 24
"""Limit of a context in tokens, for which engines make tables; the longest known has 10 million."""
_MAX_INTEGER = 1 << 62
# Mamba's configurations have an infinite upper limit of time steps.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})
# Transformers writes numbers that JSON does not have as ``{"__float__": "Infinity"}``.
_FLOAT = "__float__"
_POSITIVE = re.compile(r"rope_theta|\w*_theta|rope_local_base_freq|rotary_emb_base|rotary_base")
_NOT_NEGATIVE = re.compile(
    r"\w*_(?:eps|epsilon)|eps|temperature|top_p|min_p|repetition_penalty|lora_alpha"
)
# Minus one stands for "none" in some configurations.
_COUNT = re.compile(r"(?:num|n)_\w+|\w*(?:size|dim|rank|positions?|layers|heads|embd|model)")
_NO_COUNT = re.compile(r"\w*(?:model_type|base_model)\w*")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_PER_AXIS = (
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
# Configurations whose layers have tensors of their own only in part, or that name other
# repositories with further weights.
_PARTIAL = ("block_configs", "num_hidden_groups", "text_model_id", "audio_model_id")
_INDEX = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_OTHERS = "use the original checkpoint: this file does not belong to these weights"
_AGAIN = "use the original checkpoint's file, or correct the number"


def check_numbers(file: Path, value: Any) -> None:
    """Check every number of a JSON value.

    Raises:
        Refused: a number is not finite, or out of range; the message names the key.
    """
    for keys, number in numbers(value):
        if problem := _problem(keys, number):
            raise Refused(f"{file}: {dotted(keys)} is {_shown(number)}, {problem}", _AGAIN)


def numbers(value: Any) -> Iterator[tuple[tuple[str | int, ...], float]]:
    """Yield each number of a JSON value with its keys and indexes, without recursion."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while waiting:
        keys, one = waiting.pop()
        if isinstance(one, dict) and isinstance(one.get(_FLOAT), str):
            with suppress(ValueError):
                one = float(one[_FLOAT])
        if isinstance(one, dict):
            waiting.extend(((*keys, key), item) for key, item in one.items())
        elif isinstance(one, list):
            waiting.extend(((*keys, index), item) for index, item in enumerate(one))
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield keys, one


def dotted(keys: Sequence[str | int]) -> str:
    """Return the place of a number as users read it: ``rope_scaling.factor``, ``sizes[2]``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")[:200]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the tensors of a checkpoint allow: all dimensions, and numbers of layers."""

    num_tensors: int
    dimensions: frozenset[int]
    num_layers: int
    """One more than the highest index in the name of a tensor."""
    num_rows: int
    """The largest first dimension."""

    @classmethod
    def of(cls, tensors: Iterable[TensorEntry]) -> TensorFacts:
        tensors = list(tensors)
        indexes = [
            int(match[1]) for tensor in tensors if (match := _INDEX.search(tensor.name[:512]))
        ]
        return cls(
            len(tensors),
            frozenset(size for tensor in tensors for size in tensor.shape),
            max(indexes, default=-1) + 1,
            max((tensor.shape[0] for tensor in tensors if tensor.shape), default=0),
        )


def check_against_tensors(
    file: Path, config: Mapping[str, Any], text: Mapping[str, Any], facts: TensorFacts
) -> None:
    """Hold the numbers of a configuration against the checkpoint's tensors.

    ``text`` is the configuration of the text model, which may be ``config`` itself.

    Raises:
        Refused: the configuration describes another model than the weights.
    """
    largest = max(facts.dimensions, default=0)
    for keys, number in numbers(config):
        key = str(keys[-1]) if keys else ""
        most = facts.num_tensors if key in _LAYERS else max(largest, facts.num_tensors)
        if key in (*_LAYERS, *_PER_AXIS) and number > most:
            raise _other(file, keys, number, f"{facts.num_tensors:,} tensors, at most {largest:,}")
    if any(key in config for key in _PARTIAL):
        return
    layers, hidden = _whole(text, _LAYERS), _whole(text, _HIDDEN)
    if layers and facts.num_layers and layers[1] > facts.num_layers:
        raise _other(file, layers[:1], layers[1], f"tensors of {facts.num_layers:,} layers")
    if hidden and hidden[1] not in facts.dimensions:
        raise _other(file, hidden[:1], hidden[1], "no tensor of that width")
    vocabulary = _whole(text, ("vocab_size",))
    if vocabulary and vocabulary[1] > facts.num_rows:
        raise _other(file, vocabulary[:1], vocabulary[1], f"at most {facts.num_rows:,} rows")


def _problem(keys: Sequence[str | int], number: float) -> str:
    names = [key for key in keys if isinstance(key, str)]
    key = names[-1] if names else ""
    if isinstance(number, float) and not math.isfinite(number):
        is_allowed = number > 0 and key in _MAY_BE_INFINITE
        return "" if is_allowed else "which is not a finite number"
    if abs(number) > _MAX_INTEGER and isinstance(number, int):
        return "which is beyond all sizes of a model"
    if _POSITIVE.fullmatch(key) and number <= 0:
        return "which must be above 0"
    if _NOT_NEGATIVE.fullmatch(key) and number < 0:
        return "which must not be negative"
    if _COUNT.fullmatch(key) and not _NO_COUNT.fullmatch(key) and number < -1:
        return "which must not be negative"
    if key in _POSITIONS and number > MAX_POSITIONS:
        return f"more than the {MAX_POSITIONS:,} tokens of the longest context"
    return ""


def _whole(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, int] | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def _shown(number: float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _other(file: Path, keys: Sequence[str | int], number: float, weights: str) -> Refused:
    where = dotted(keys)
    return Refused(f"{file}: {where} is {_shown(number)}, but the weights have {weights}", _OTHERS)
