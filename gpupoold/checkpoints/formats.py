"""Repositories and folders that are no checkpoint for the engine: the reason and a remedy.

File names and ``config.json`` decide. Architectures are not judged here: the engine knows its own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from gpupoold.errors import Refused

_ORIGINAL = (
    "use the original model's repository (the 'base model' on the repository's page), or an AWQ, "
    "GPTQ, FP8 or compressed-tensors version of the model"
)
_TEXT_ONLY = "only language models are served"

# A file name, what the repository is, a remedy; the first match counts.
_FORMATS: tuple[tuple[str, str, str], ...] = (
    ("model_index.json", "is a Diffusers pipeline, which makes images or video", _TEXT_ONLY),
    (
        "adapter_config.json",
        "has a LoRA adapter, not a model",
        "add the adapter to its base model with `gpupool add-adapter NAME --of MODEL`",
    ),
    ("*.gguf", "has its weights only as GGUF files, which vLLM does not read", _ORIGINAL),
    ("*.ggml", "has its weights only as GGML files, which vLLM does not read", _ORIGINAL),
    ("*.llamafile", "has its weights only as a llamafile, which vLLM does not read", _ORIGINAL),
    ("*.onnx", "has its weights only for ONNX Runtime", _ORIGINAL),
    ("*.engine", "has its weights only as TensorRT engines", _ORIGINAL),
    ("*.nemo", "has its weights only as a NeMo archive", _ORIGINAL),
    ("*.mlpackage", "has its weights only for Core ML", _ORIGINAL),
    ("*.mlmodel", "has its weights only for Core ML", _ORIGINAL),
    ("*.litertlm", "has its weights only for LiteRT", _ORIGINAL),
    ("*.tflite", "has its weights only for LiteRT", _ORIGINAL),
    ("*.task", "has its weights only for MediaPipe", _ORIGINAL),
    ("*.pte", "has its weights only for ExecuTorch", _ORIGINAL),
    ("*.msgpack", "has its weights only for Flax", _ORIGINAL),
    ("*.h5", "has its weights only for TensorFlow or Keras", _ORIGINAL),
)

# Methods of other engines, none of which vLLM has; a test compares with the installed vLLM.
UNREAD_QUANTIZATION = frozenset(
    {
        "aqlm",
        "bitnet",
        "bitsandbytes",
        "eetq",
        "exl2",
        "exl3",
        "gguf",
        "higgs",
        "hqq",
        "quanto",
        "spqr",
        "vptq",
    }
)


def check_format(where: str, paths: Iterable[str]) -> None:
    """Refuse a repository or folder without weights for the engine, if its format is known.

    ``where`` names the place in the message; ``paths`` are relative, also of subfolders.

    Raises:
        Refused: the files belong to another program, or are an adapter.
    """
    names = [path.rpartition("/")[2] for path in paths]
    folders = [part for path in paths for part in path.split("/")[:-1]]
    for pattern, what, remedy in _FORMATS:
        if any(fnmatch.fnmatchcase(name, pattern) for name in (*names, *folders)):
            raise Refused(f"{where} {what}", remedy)


def check_kind(file: str, config: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Refuse a configuration of a kind that is never served.

    ``file`` is the name of the configuration for messages; ``parts`` are ``config`` and its text
    model's configuration.

    Raises:
        Refused: the model has an encoder, or a quantisation that the engine does not have.
    """
    architecture = config["architectures"][0]
    if config.get("is_encoder_decoder") is True:
        raise Refused(
            f"{file}: {architecture} is an encoder-decoder model, which is not supported",
            "use a decoder-only model",
        )
    for part in parts:
        for key in ("quantization_config", "quantization"):
            settings = part.get(key)
            if not isinstance(settings, dict):
                continue
            method = str(settings.get("quant_method", "")).lower()
            if method in UNREAD_QUANTIZATION:
                raise Refused(
                    f"{file}: the quantisation {method!r} is not supported by vLLM", _ORIGINAL
                )
            if not method and {"bits", "group_size"} <= settings.keys():
                raise Refused(
                    f"{file}: the weights are quantised for MLX (Apple), which vLLM does not read",
                    _ORIGINAL,
                )
