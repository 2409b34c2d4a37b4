"""Resolution of a user's source to a local folder or a Hugging Face id."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gpupoold.errors import Refused, UsageError
from gpupoold.files import hint_to_read

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*(?:/[A-Za-z0-9][A-Za-z0-9._:@+-]*)*")
_MAX_NEAR_NAMES = 3

BUILTIN_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "qwen-7b": "Qwen/Qwen2.5-7B-Instruct",
        "qwen1.5-7b": "Qwen/Qwen1.5-7B-Chat",
        "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
        "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
        "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
        "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
        "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
        "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
        "qwen3-0.6b": "Qwen/Qwen3-0.6B",
        "qwen3-1.7b": "Qwen/Qwen3-1.7B",
        "qwen3-4b": "Qwen/Qwen3-4B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen3-14b": "Qwen/Qwen3-14B",
        "qwen2.5-vl-7b": "Qwen/Qwen2.5-VL-7B-Instruct",
        "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
        "qwen3-embedding-0.6b": "Qwen/Qwen3-Embedding-0.6B",
        "bge-m3": "BAAI/bge-m3",
        "bge-reranker-v2-m3": "BAAI/bge-reranker-v2-m3",
        "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
        "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
        "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
        "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral-nemo-12b": "mistralai/Mistral-Nemo-Instruct-2407",
        "gemma-2-2b": "google/gemma-2-2b-it",
        "gemma-2-9b": "google/gemma-2-9b-it",
        "gemma-3-1b": "google/gemma-3-1b-it",
        "gemma-3-4b": "google/gemma-3-4b-it",
        "gemma-3-12b": "google/gemma-3-12b-it",
        "gpt-oss-20b": "openai/gpt-oss-20b",
        "phi-2": "microsoft/phi-2",
        "phi-4": "microsoft/phi-4",
        "yi-6b": "01-ai/Yi-6B-Chat",
        "yi-9b": "01-ai/Yi-9B",
        "internlm2.5-7b": "internlm/internlm2_5-7b-chat",
        "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    }
)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """An existing checkpoint folder."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hugging Face hub, to be downloaded."""

    repo_id: str


def resolve(name: str, source: str | None, model_dirs: Sequence[Path]) -> LocalSource | HubSource:
    """Return the source of the checkpoint of model ``name``.

    A source is a folder, a Hugging Face id ``org/name``, or a name to look up. Without a source,
    ``name`` is looked up: as a folder in ``model_dirs``, in order, then among the built-in short
    names.

    Raises:
        UsageError: the name or the source is malformed.
        Refused: nothing was found; the hint lists the searched places and similar names.
    """
    if source is None:
        return _look_up(name, name, model_dirs)
    if not source.strip():
        raise UsageError("the source is empty", "give a folder or a Hugging Face id (org/name)")
    if source.startswith(("/", ".", "~")) or os.path.isdir(source):
        return LocalSource(_existing_folder(source))
    if "/" not in source:
        return _look_up(source, name, model_dirs)
    if not is_hub_id(source):
        raise UsageError(
            f"source {source!r} is neither a folder nor a Hugging Face id",
            "give an absolute path or an id such as Qwen/Qwen2.5-7B-Instruct",
        )
    return HubSource(source)


def is_hub_id(text: str) -> bool:
    """Return whether ``text`` has the form ``org/name`` of a repository id."""
    well_formed = _HUB_ID.fullmatch(text) is not None
    return well_formed and "--" not in text and ".." not in text and not text.endswith(".git")


def _existing_folder(source: str) -> Path:
    try:
        path = Path(source).expanduser()
    except (RuntimeError, ValueError) as error:  # no such user; a null byte
        raise UsageError(f"source {source!r}: {error}") from error
    # os.path, not Path, which raises an error without permission to look.
    hint = hint_to_read(path)
    if hint:
        raise Refused(f"{path}: the daemon's user may not read this folder", hint)
    if os.path.isdir(path):
        return path.resolve()
    if os.path.exists(path):
        raise Refused(f"{path} is not a folder", "give the folder that holds config.json")
    raise Refused(f"{path} does not exist", "check the path")


def _look_up(wanted: str, name: str, model_dirs: Sequence[Path]) -> LocalSource | HubSource:
    if not _NAME.fullmatch(wanted):
        raise UsageError(
            f"model name {wanted!r} is malformed",
            "use letters, digits and . _ - : @ +, with / between parts",
        )
    for folder in model_dirs:
        if os.path.isdir(folder / wanted):
            return LocalSource((folder / wanted).resolve())
    if repo_id := BUILTIN_MODELS.get(wanted.lower()):
        return HubSource(repo_id)
    raise Refused(f"no checkpoint is known for {wanted!r}", _hint(wanted, name, model_dirs))


def _hint(wanted: str, name: str, model_dirs: Sequence[Path]) -> str:
    folders = [entry for folder in model_dirs for entry in _subfolders(folder)]
    known = {entry.lower(): entry for entry in [*BUILTIN_MODELS, *folders]}
    near = difflib.get_close_matches(wanted.lower(), known, n=_MAX_NEAR_NAMES, cutoff=0.6)
    searched = ", ".join(map(str, model_dirs)) or "no folders (paths.model_dirs is empty)"
    source = wanted if is_hub_id(wanted) else "PATH or --source ORG/NAME"
    return "; ".join(
        [f"similar: {', '.join(known[key] for key in near)}"] * bool(near)
        + [f"searched {searched} and the built-in names"]
        + [f"give the source: gpupool add-model {name} --source {source}"]
    )


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return []
