"""The layout of sentence-transformers: ``modules.json`` and a folder per module.

vLLM reads the pooling from a module's folder. Without the folder vLLM would pool in another way and
return wrong embeddings without an error.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

from gpupoold.checkpoints.files import read_json_value
from gpupoold.checkpoints.layout import MODULES_FILE
from gpupoold.errors import Refused

_MAX_MODULES = 32
# Ends of the names of model classes without a language model's head.
_POOLING_CLASSES = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForMaskedLM",
    "ForRewardModeling",
)
_AGAIN = "fetch the checkpoint again, with its subfolders"
# Kinds of modules with files that vLLM reads, by the last part of the type's name.
_WITH_FILES = ("Pooling", "Dense")


def check_modules(path: Path) -> None:
    """Check that the modules that ``modules.json`` lists are there; no such file is no error.

    Raises:
        Refused: the file is no list of modules, or a module's folder has no ``config.json``.
    """
    file = path / MODULES_FILE
    if not os.path.isfile(file):
        return
    for module in _modules(file):
        kind, folder = str(module["type"]).rpartition(".")[2], module["path"]
        if kind not in _WITH_FILES:
            continue
        relative = PurePosixPath(folder)
        if relative.is_absolute() or ".." in relative.parts:
            raise Refused(f"{file}: the folder {folder!r} is outside of the checkpoint", _AGAIN)
        if not os.path.isfile(path / relative / "config.json"):
            raise Refused(f"{path}: the module {folder!r} has no config.json", _AGAIN)


def is_pooling(path: Path, architecture: str) -> bool:
    """Return whether a checkpoint embeds, ranks or classifies, as vLLM decides by default."""
    if os.path.isfile(path / MODULES_FILE):
        return True
    is_language_model = architecture.endswith(("LMHeadModel", "ForCausalLM"))
    return architecture.endswith(_POOLING_CLASSES) and not is_language_model


def _modules(file: Path) -> list[dict[str, Any]]:
    modules = read_json_value(file)
    is_list = isinstance(modules, list) and len(modules) <= _MAX_MODULES
    if not is_list or not all(map(_is_module, modules)):
        raise Refused(f"{file}: is no list of modules with 'type' and 'path'", _AGAIN)
    return list(modules)


def _is_module(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("type", "path")
    )
