"""The files of a checkpoint by name: weights, tokenizer, code; what to download, what to refuse.

File names and ``config.json`` decide. Architectures are not judged here: the engine knows its own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpupoold.errors import Refused

CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_PICKLE_FILE = "adapter_model.bin"

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model*",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# Models in Mistral's format have an image processor in the engine, not in a file.
_MISTRAL_TOKENIZER = "tekken.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_TRAINING_STATE = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "tokenizer.model*")
# A second copy of the weights in Mistral's format, with a configuration.
_MISTRAL_FORMAT = ("consolidated*", "params.json")
TEMPLATE_FOLDER = "additional_chat_templates"

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

Content = Literal["checkpoint", "adapter"]


def safetensors_files(names: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Return candidate weight files and the name of the index that selects among them.

    As in the engine, weights in Mistral's format take precedence.
    """
    files = _matching(names, ("*.safetensors",))
    if consolidated := _matching(files, ("consolidated*",)):
        return consolidated, "consolidated.safetensors.index.json"
    return files, "model.safetensors.index.json"


def pickle_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return pickled weight files without leftovers of training."""
    leftovers = set(_matching(names := tuple(names), _TRAINING_STATE))
    return tuple(name for name in _matching(names, _PICKLES) if name not in leftovers)


def tokenizer_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return files with a vocabulary; ``tokenizer_config.json`` alone is no tokenizer."""
    return _matching(names, _TOKENIZERS)


def has_image_processor(names: Collection[str]) -> bool:
    return _MISTRAL_TOKENIZER in names or any(name in names for name in _PROCESSORS)


def files_to_download(
    paths: Collection[str], *, allow_pickle: bool, allow_remote_code: bool
) -> tuple[str, ...]:
    """Return the part of a repository needed for serving.

    Only the top folder counts, apart from chat templates and modules of sentence-transformers:
    other subfolders hold other formats of the same weights. Pickled weights are included only if
    allowed and without safetensors; code only if allowed. Hidden files are never included, because
    the download keeps its state in hidden files.
    """
    top = [path for path in paths if "/" not in path and not path.startswith(".")]
    templates = _matching(paths, (f"{TEMPLATE_FOLDER}/*.jinja",))
    wanted = {*_matching(top, _SMALL), *(path for path in templates if path.count("/") == 1)}
    if MODULES_FILE in top:
        wanted |= module_files(paths, allow_pickle=allow_pickle)
    weights = _matching(top, ("*.safetensors",))
    if any(not fnmatch.fnmatchcase(name, "consolidated*") for name in weights):
        native = set(_matching(top, _MISTRAL_FORMAT))
        weights = tuple(name for name in weights if name not in native)
        wanted -= native
    if not weights and allow_pickle:
        weights = pickle_files(top)
    if allow_remote_code:
        wanted.update(_matching(top, ("*.py",)))
    return tuple(sorted(wanted | set(weights)))


def module_files(paths: Iterable[str], *, allow_pickle: bool) -> set[str]:
    """Return the files of modules, which are in folders such as ``1_Pooling`` and ``2_Dense``."""
    names = ["config.json", "model.safetensors"]
    if allow_pickle:
        names.append("pytorch_model.bin")
    patterns = [f"[0-9]_[A-Z]*/{name}" for name in names]
    found = {path for path in paths if path.count("/") == 1}
    return {
        path for path in found if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }


def adapter_files_to_download(paths: Collection[str], *, allow_pickle: bool) -> tuple[str, ...]:
    """Return the part of an adapter's repository needed for serving.

    A pickled file is included only if allowed and without safetensors.
    """
    wanted = [ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE]
    if allow_pickle and ADAPTER_WEIGHTS_FILE not in paths:
        wanted.append(ADAPTER_PICKLE_FILE)
    return tuple(name for name in wanted if name in paths)


def is_weight_file(name: str) -> bool:
    """Return whether a file has weights, which are large and downloaded last."""
    return bool(_matching((name,), ("*.safetensors", *_PICKLES)))


def _matching(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    patterns = tuple(patterns)
    return tuple(
        sorted(name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns))
    )


def check_format(where: str, paths: Iterable[str]) -> None:
    """Refuse a repository or folder without weights for the engine, if its format is known.

    ``where`` names the place in the message; ``paths`` are relative, also of subfolders. Raises
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
    model's configuration. Raises Refused: the model has an encoder, or a quantisation that the
    engine does not have.
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """The kind of files wanted of a repository, and the permitted kinds that can run code."""

    content: Content = "checkpoint"
    allow_pickle: bool = False
    allow_remote_code: bool = False

    def choose(self, repo_id: str, listed: Sequence[str]) -> tuple[str, ...]:
        """Return the files of a repository that serving needs; ``listed`` are all its files.

        Raises Refused: the repository has something else, or no permitted weights.
        """
        if self.content == "adapter":
            if ADAPTER_CONFIG_FILE not in listed:
                raise Refused(
                    f"{repo_id} has no {ADAPTER_CONFIG_FILE}, so it is no adapter",
                    "add a whole model with `gpupool add-model`",
                )
            chosen = adapter_files_to_download(listed, allow_pickle=self.allow_pickle)
        else:
            if CONFIG_FILE not in listed:
                check_format(repo_id, listed)
            chosen = files_to_download(
                listed, allow_pickle=self.allow_pickle, allow_remote_code=self.allow_remote_code
            )
        if not any(map(is_weight_file, chosen)):
            raise _no_weights(repo_id, listed, self.content)
        return chosen


def _no_weights(repo_id: str, listed: Sequence[str], content: Content) -> Refused:
    if pickle_files(path for path in listed if "/" not in path):
        return Refused(
            f"{repo_id} has its weights only in pickle files, which can run any code when loaded",
            "use a safetensors version, or set allow_pickle = true under [security]",
        )
    if content == "adapter":
        hint = f"use a repository with {ADAPTER_WEIGHTS_FILE}"
    else:
        check_format(repo_id, listed)
        hint = "use a repository with the model in Hugging Face's format"
    return Refused(f"{repo_id} has no weights (*.safetensors)", hint)
