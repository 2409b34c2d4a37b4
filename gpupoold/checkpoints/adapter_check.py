"""Checks of a LoRA adapter's folder before any load, against the checkpoint of its base.

The checks read JSON and the headers of safetensors files. The worker checks the rest.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.check import check_numbers, list_folder
from gpupoold.checkpoints.files import TensorEntry, read_json, read_tensors
from gpupoold.checkpoints.manifest import require_complete
from gpupoold.errors import Refused

MAX_RANK = 512
_FLOATS = frozenset({"F32", "F16", "BF16"})
_MERGE = "merge the adapter into its base with peft, and add the result as a model"
# Features of peft that change the result and that vLLM 0.32 does not compute; a value that is not
# listed as harmless is refused.
_UNSUPPORTED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("use_dora", (None, False)),
    ("lora_bias", (None, False)),
    ("bias", (None, "none")),
    ("use_qalora", (None, False)),
    ("use_bdlora", (None, {})),
    ("layer_replication", (None, [])),
    ("alora_invocation_tokens", (None, [])),
    ("trainable_token_indices", (None, [], {})),
    ("modules_to_save", (None, [])),
)
# These ways to begin the training change the base's weights too.
_CHANGES_BASE = re.compile(r"(?i)pissa|olora|corda|loftq")
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])"
    r"(?:\.weight)?"
)
# Keys of rank_pattern and alpha_pattern: names with dots, `\.` and `\d+`, whose match takes time
# in proportion to the name. Python's cache of compiled expressions has room for as many keys.
_PATTERN = re.compile(r"\^?(?:\w|-|\\?\.(?!\*)|\\d\+?(?!\\d|\d))+\$?")
_MAX_PATTERNS = 500
_MAX_PATTERN_CHARACTERS = 256
# A checkpoint lacks these modules if their weight is the input embedding's.
_MAY_BE_TIED = frozenset({"lm_head", "embed_out", "output"})
# The part of a name from the numbered layer on: prefixes differ between releases of transformers.
_LAYER = re.compile(r"(?:^|\.)([a-z_]+\.\d+\..+)$")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The content of an adapter's folder; ``rank`` is the largest rank of its layers."""

    path: Path
    rank: int
    weight_bytes: int
    modules: tuple[str, ...]


def check_adapter_config(path: Path) -> dict[str, Any]:
    """Return the adapter's configuration after checking it.

    Raises Refused: the file is missing, too large or unreadable, or the adapter is of a kind that
    the engine does not compute.
    """
    file = path / layout.ADAPTER_CONFIG_FILE
    if not os.path.exists(file):
        hint = f"give the folder that holds {layout.ADAPTER_CONFIG_FILE}"
        if os.path.isfile(path / layout.CONFIG_FILE):
            hint = "the folder has a whole model: add it with `gpupool add-model`"
        raise Refused(f"{path}: has no {layout.ADAPTER_CONFIG_FILE}, so it is no adapter", hint)
    config = read_json(file)
    check_numbers(file, config)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Refused(f"{file}: the adapter is of type {_shown(kind)}, not LORA", _MERGE)
    for key, harmless in _UNSUPPORTED:
        if config.get(key) not in harmless:
            raise Refused(f"{file}: {key} is {_shown(config[key])}, which vLLM cannot use", _MERGE)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.search(start):
        raise Refused(
            f"{file}: init_lora_weights is {_shown(start)}, which changes the base's weights too",
            "convert the adapter with path_initial_model_for_weight_conversion of peft",
        )
    largest_rank(file, config)
    _check_patterns(file, config)
    return config


def _check_patterns(file: Path, config: dict[str, Any]) -> None:
    """Check the keys that choose ranks and scales of layers, which vLLM takes for expressions.

    vLLM matches each key with the name of each layer, where an expression can take for ever.
    """
    keys: list[str] = []
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict):
            raise Refused(f"{file}: {field} is {_shown(patterns)}, not an object", _MERGE)
        keys += patterns
    if len(keys) > _MAX_PATTERNS:
        raise Refused(
            f"{file}: rank_pattern and alpha_pattern have {len(keys):,} keys, at most "
            f"{_MAX_PATTERNS} can be used",
            _MERGE,
        )
    for key in keys:
        if len(key) > _MAX_PATTERN_CHARACTERS or _PATTERN.fullmatch(key) is None:
            raise Refused(
                f"{file}: the key {_shown(key)} of rank_pattern or alpha_pattern is no plain name "
                "of layers",
                _MERGE,
            )


def largest_rank(file: Path, config: dict[str, Any]) -> int:
    """Return the largest rank in an adapter's configuration.

    Raises Refused: a rank is missing, no positive integer, or too large for the engine.
    """
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise Refused(f"{file}: the rank {_shown(rank)} is not a positive number", _MERGE)
        if rank > MAX_RANK:
            raise Refused(
                f"{file}: the rank {_shown(rank)} is above vLLM's limit of {MAX_RANK}", _MERGE
            )
    return max(rank for rank in ranks if isinstance(rank, int))


def check_adapter(path: Path, base: Path, *, allow_pickle: bool) -> AdapterFacts:
    """Describe the adapter in folder ``path`` for the checkpoint in folder ``base``.

    Blocks on file access. Raises Refused: the adapter is incomplete, damaged, of another base, or
    of a kind that the engine does not compute; the message names the file and the tensor.
    """
    names = list_folder(path)
    require_complete(path)
    config = check_adapter_config(path)
    rank = largest_rank(path / layout.ADAPTER_CONFIG_FILE, config)
    file = path / layout.ADAPTER_WEIGHTS_FILE
    if layout.ADAPTER_WEIGHTS_FILE not in names:
        _check_pickle(path, names, allow_pickle=allow_pickle)
        num_bytes = (path / layout.ADAPTER_PICKLE_FILE).stat().st_size
        return AdapterFacts(path, rank, num_bytes, ())
    tensors = read_tensors(file)
    shapes = _BaseShapes(base, list_folder(base), is_transposed=bool(config.get("fan_in_fan_out")))
    parts: dict[str, str] = {}
    largest = 0
    for tensor in tensors:
        module, part, inner = _check_tensor(file, tensor, rank, shapes)
        parts[module] = parts.get(module, "") + part
        largest = max(largest, inner)
    for module, found in parts.items():
        if sorted(found) != ["A", "B"]:
            raise Refused(
                f"{file}: the module {module!r} has not one lora_A and one lora_B",
                "copy the adapter again",
            )
    if not parts:
        raise Refused(f"{file}: has no tensors", "copy the adapter again")
    # Slots on the device have the configuration's rank.
    if largest < rank and not config.get("rank_pattern"):
        raise _other_rank(file, f"no tensor has a rank above {largest}", rank)
    num_bytes = sum(tensor.end - tensor.begin for tensor in tensors)
    kinds = {module.rpartition(".")[2] for module in parts}
    return AdapterFacts(path, rank, num_bytes, tuple(sorted(kinds)))


def estimate_slot_bytes(base: Path, rank: int, num_slots: int, dtype_bits: int) -> int:
    """Return the device bytes of ``num_slots`` slots for adapters of all layers of a checkpoint.

    Packed layers are not counted.
    """
    files, _ = layout.safetensors_files(list_folder(base))
    widths = (
        sum(tensor.shape)
        for file in files
        for tensor in read_tensors(base / file)
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2
    )
    return sum(widths) * rank * num_slots * dtype_bits // 8


def _check_pickle(path: Path, names: Sequence[str], *, allow_pickle: bool) -> None:
    if layout.ADAPTER_PICKLE_FILE not in names:
        raise Refused(
            f"{path}: has no {layout.ADAPTER_WEIGHTS_FILE}",
            "the download or copy may be incomplete; fetch the adapter again",
        )
    if not allow_pickle:
        raise Refused(
            f"{path}: has its weights only in {layout.ADAPTER_PICKLE_FILE}, a pickle file, which "
            "can run any code when loaded",
            "save the adapter as safetensors, or set allow_pickle = true under [security]",
        )


def _check_tensor(
    file: Path, tensor: TensorEntry, rank: int, shapes: _BaseShapes
) -> tuple[str, str, int]:
    """Return the tensor's module, ``A`` or ``B``, and the rank."""
    match = _TENSOR.fullmatch(tensor.name)
    if match is None:
        raise Refused(f"{file}: {tensor.name!r} is not the name of a LoRA tensor", _MERGE)
    if tensor.dtype not in _FLOATS or len(tensor.shape) != 2:
        kind = f"{tensor.dtype} of shape {list(tensor.shape[:8])}"
        raise Refused(f"{file}: {tensor.name!r} is {kind}, which is not supported", _MERGE)
    module, part = match["module"], match["part"]
    inner, outer = tensor.shape if part == "A" else tensor.shape[::-1]
    if inner > rank and "experts" not in module:  # those of fused experts are stacked
        raise _other_rank(file, f"{tensor.name!r} has the rank {inner}", rank)
    widths = shapes.widths(module, is_input=(part == "A") != bool(match["embedding"]))
    if widths is None:
        raise Refused(
            f"{file}: the base has no module {module!r}", "the adapter belongs to another model"
        )
    if widths and outer not in widths:
        raise Refused(
            f"{file}: {tensor.name!r} is for a layer of width {outer}, but the base's layer has "
            f"the width {min(widths)}",
            "the adapter belongs to another model",
        )
    return module, part, inner


def _other_rank(file: Path, problem: str, rank: int) -> Refused:
    return Refused(
        f"{file}: {problem}, but the configuration says {rank}",
        "configuration and weights are of different adapters; copy the adapter again",
    )


class _BaseShapes:
    """The shapes of the base's weights by module."""

    def __init__(self, base: Path, names: Iterable[str], *, is_transposed: bool) -> None:
        files, _ = layout.safetensors_files(names)
        self._is_transposed = is_transposed
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        self._modules: set[str] = set()
        for file in files:
            for tensor in read_tensors(base / file):
                module, _, what = tensor.name.rpartition(".")
                key = _layer(module)
                self._modules.update(itertools.accumulate(key.split("."), "{}.{}".format))
                if what == "weight" and len(tensor.shape) == 2:
                    self._shapes.setdefault(key, set()).add(tensor.shape)

    def widths(self, module: str, *, is_input: bool) -> set[int] | None:
        """Return the possible widths of a module's input or output.

        Empty if unknown, as for packed weights; None without such a module.
        """
        key = _layer(module)
        is_known = not self._modules or key in self._modules or key in _MAY_BE_TIED
        index = int(is_input != self._is_transposed)
        return {shape[index] for shape in self._shapes.get(key, ())} if is_known else None


def _layer(module: str) -> str:
    match = _LAYER.search(module)
    return match[1] if match is not None else module.rpartition(".")[2]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
