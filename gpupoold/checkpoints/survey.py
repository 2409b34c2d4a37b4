"""All that the daemon reads of a checkpoint or an adapter, as one value.

The daemon does not read these files itself: a process of its own does, which may be slow, or end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.adapter_check import AdapterFacts, check_adapter
from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint, list_folder
from gpupoold.checkpoints.files import check_files, read_json
from gpupoold.checkpoints.fit import estimate_weight_bytes
from gpupoold.checkpoints.headers import remote_weights
from gpupoold.checkpoints.numbers import check_numbers

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
    """Return the dataclass of :func:`encoded`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda of, value: of(value))
