"""All that the daemon reads of a checkpoint or an adapter, and the size of the loaded weights.

The daemon does not read these files itself: a process of its own does, which may be slow, or end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.adapter_check import AdapterFacts, check_adapter
from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint, check_numbers, list_folder
from gpupoold.checkpoints.files import (
    DTYPE_BITS,
    check_files,
    elements_by_dtype,
    read_json,
    read_tensors,
)
from gpupoold.checkpoints.manifest import remote_weights
from gpupoold.errors import Refused, UsageError
from gpupoold.latency.shape import why_undivided
from gpupoold.units import format_bytes

T = TypeVar("T")

# Files of numbers that an engine applies to every request, beside ``config.json``.
_SETTINGS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "quant_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# A tokenizer's largest context is often written as 10^30, which stands for "none".
_NO_LIMIT = "model_max_length"

MODEL_DTYPE_BITS = {"float16": 16, "half": 16, "bfloat16": 16, "float32": 32, "float": 32}
# Loading casts these dtypes to the model's; integers and 8-bit floats are quantized data.
_CAST_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})

_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")
_EXPERT_WIDTHS = ("moe_intermediate_size",)


@dataclass(frozen=True, slots=True)
class CheckpointSurvey:
    """A checked checkpoint.

    ``weight_bytes`` are the estimated device bytes of the weights. ``is_remote`` is True if the
    weights are still to be downloaded.
    """

    info: CheckpointInfo
    weight_bytes: int
    is_remote: bool


def survey_checkpoint(
    path: Path,
    dtype: str,
    engine: Mapping[str, str],
    *,
    allow_pickle: bool,
    allow_remote_code: bool,
    may_be_remote: bool,
) -> CheckpointSurvey:
    """Check every file of a checkpoint that is read later; see :func:`check_checkpoint`.

    Raises:
        Refused: a file or its content; the message names the file.
        UsageError: the engine does not offer ``dtype``.
    """
    list_folder(path)  # with a better error
    check_files(path)
    remote = remote_weights(path) if may_be_remote else None
    info = check_checkpoint(
        path, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code, remote=remote
    )
    for name in _SETTINGS:
        if (path / name).exists():
            check_numbers(path / name, read_json(path / name))
    tokenizer_config = path / layout.TOKENIZER_CONFIG_FILE
    if tokenizer_config.exists():
        settings = read_json(tokenizer_config)
        if isinstance(settings.get(_NO_LIMIT), int):
            del settings[_NO_LIMIT]
        check_numbers(tokenizer_config, settings)
    weight_bytes = estimate_weight_bytes(info, dtype, engine)
    return CheckpointSurvey(info, weight_bytes, remote is not None)


def survey_adapter(path: Path, base: Path, *, allow_pickle: bool) -> AdapterFacts:
    """Check every file of an adapter; see :func:`check_adapter`."""
    list_folder(path)
    check_files(path)
    return check_adapter(path, base, allow_pickle=allow_pickle)


def encoded(found: Any) -> bytes:
    """Return a dataclass as bytes for :func:`decoded`."""
    return msgspec.msgpack.encode(found, enc_hook=str)


def decoded(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda of, value: of(value))


def estimate_weight_bytes(
    info: CheckpointInfo, dtype: str, engine: Mapping[str, str] | None = None
) -> int:
    """Return the device bytes of the weights in ``dtype``; quantized tensors keep their size.

    ``auto`` follows the engine: the checkpoint's dtype, but 16 bits for float32. The weights of a
    drafter in the options ``engine`` count too.

    Raises:
        UsageError: the engine does not offer ``dtype``.
        Refused: the drafter's files are damaged.
    """
    target_bits = model_dtype_bits(dtype)
    num_bits = 0
    drafter = drafter_elements(engine or {}, info.path)
    for stored, num_elements in [*info.elements, *drafter.items()]:
        bits = target_bits if stored in _CAST_DTYPES else DTYPE_BITS[stored]
        num_bits += num_elements * bits
    return num_bits // 8


def model_dtype_bits(dtype: str) -> int:
    """Return the bits of a number in a model's ``dtype``.

    Raises UsageError: the engine does not offer ``dtype``.
    """
    if dtype != "auto" and dtype not in MODEL_DTYPE_BITS:
        raise UsageError(
            f"unknown dtype {dtype!r}", f"use auto, {', '.join(sorted(MODEL_DTYPE_BITS))}"
        )
    return 16 if dtype == "auto" else MODEL_DTYPE_BITS[dtype]


def check_fits(
    info: CheckpointInfo, dtype: str, weight_bytes: int, device_bytes: int, *, kv_bytes: int = 0
) -> None:
    """Check that a device of ``device_bytes`` can hold the weights and ``kv_bytes``.

    ``weight_bytes`` are those of :func:`estimate_weight_bytes`, ``device_bytes`` is the memory of
    the largest device for the model, ``kv_bytes`` the least useful KV, for example of one request.

    Raises:
        Refused: the model does not fit; the message has both sizes, the hint a fitting alternative.
        UsageError: the engine does not offer ``dtype``.
    """
    needed_bytes = weight_bytes + kv_bytes
    if needed_bytes <= device_bytes:
        return
    kv = f" and {format_bytes(kv_bytes)} of KV" if kv_bytes else ""
    raise Refused(
        f"{info.path}: {format_bytes(weight_bytes)} of weights ({dtype}){kv} do not fit on a "
        f"device of {format_bytes(device_bytes)}",
        _remedy(info, dtype, needed_bytes, device_bytes),
    )


def _remedy(info: CheckpointInfo, dtype: str, needed_bytes: int, device_bytes: int) -> str:
    saved_bytes = estimate_weight_bytes(info, dtype) - estimate_weight_bytes(info, "bfloat16")
    if saved_bytes > 0 and needed_bytes - saved_bytes <= device_bytes:
        smaller = format_bytes(needed_bytes - saved_bytes)
        return f"with dtype bfloat16 the model takes {smaller} and fits"
    needed = f"use a device of at least {format_bytes(needed_bytes)}"
    return needed if info.quantization else f"{needed}, or a quantized version of the model"


def drafter_elements(engine: Mapping[str, str], model: Path | None = None) -> dict[str, int]:
    """Return the numbers of elements by dtype of the drafter in a local folder.

    ``engine`` has the engine options of the model in folder ``model``. Empty without a drafter of
    its own, as for n-grams, and for a module for MTP in the model's checkpoint. Raises Refused: a
    weight file of the drafter is damaged, or the folder has no weights.
    """
    method, folder = drafter_of(engine)
    # vLLM reads a module for MTP by this name, or by a family's older name.
    is_mtp = method is not None and (method == "mtp" or method.endswith("_mtp"))
    if folder is None or (is_mtp and model and folder.resolve() == model.resolve()):
        return {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refused(
            f"{folder}: has no weights (*.safetensors) of a drafter",
            "give the drafter's folder, or n-gram drafts",
        )
    return elements_by_dtype(tensor for file in files for tensor in read_tensors(file))


def drafter_of(engine: Mapping[str, str]) -> tuple[str | None, Path | None]:
    """Return the method in the options of speculative decoding, and the drafter's local folder.

    Both are None if not given, the folder also for a name of another kind.
    """
    method = engine.get("speculative_config.method") or engine.get("spec_method")
    name = engine.get("speculative_config.model") or engine.get("spec_model")
    try:
        config = json.loads(engine.get("speculative_config", "{}"))
    except (ValueError, RecursionError):  # vLLM reports the error
        config = None
    if isinstance(config, dict):
        method = _text(config, "method") or method
        name = _text(config, "model") or name
    folder = Path(name) if name else None
    return method, folder if folder is not None and folder.is_dir() else None


def _text(config: dict[str, object], key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) else None


def why_checkpoint_undivided(config: Mapping[str, Any], degree: int) -> str:
    """Return why ``degree`` GPUs cannot divide the model of a ``config.json``; empty if they can.

    Dimensions under unknown names count as divisible: vLLM's own classes decide in the end.
    """
    nested = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((section for section in nested if isinstance(section, dict)), config)
    is_latent = bool(text.get("kv_lora_rank"))  # each GPU has the complete latent KV
    return why_undivided(
        degree,
        num_heads=_whole(text, _HEADS),
        num_kv_heads=None if is_latent else _whole(text, _KV_HEADS),
        width=_whole(text, _EXPERT_WIDTHS) or _whole(text, _WIDTHS),
        vocab_size=_whole(text, ("vocab_size",)),
    )


def _whole(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
