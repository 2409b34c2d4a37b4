"""The files of a checkpoint by name: weights, tokenizer, code."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable

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
    """Return whether an engine can prepare images for the model."""
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
