"""Tokenizers of models with equal files: their vocabulary is in a process's memory once.

A tokenizer of 128,000 tokens takes 80 MB, and each copy for a thread 20 to 40 MB. Twenty fine-tunes
have twenty equal ones.
"""

from __future__ import annotations

import hashlib
import json
import threading
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from transformers import TokenizersBackend
from vllm.tokenizers.hf import CachedHfTokenizer, maybe_make_thread_pool

# The files that vLLM and transformers read for a tokenizer, and the fields of config.json.
_FILES = (
    *("*token*", "*vocab*", "merges*", "*.model", "*.tiktoken", "*.bpe", "*.jinja", "*.py"),
    *("spiece*", "sentence*", "tekken*", "modules.json"),
)
_FIELDS = ("architectures", "auto_map", "model_type", "tokenizer_class", "transformers_version")
# Processors of images and the like add tokens.
_PROCESSORS = "*processor_config.json"

_build = CachedHfTokenizer.from_pretrained
_lock = threading.Lock()
_tokenizers: WeakValueDictionary[str, Any] = WeakValueDictionary()


def share_tokenizers(num_threads: int = 0) -> None:
    """Let vLLM give models with equal files one tokenizer in this process.

    The models' objects differ, so each has a ``name_or_path`` of its own, and share the vocabulary.
    With ``num_threads`` they share that many copies too, by which several threads tokenise at a
    time; otherwise one thread tokenises.
    """

    def from_pretrained(path: str | Path, *args: Any, **kwargs: Any) -> Any:
        digest = None if args or kwargs.get("trust_remote_code") else _digest(Path(path), kwargs)
        if digest is None:
            return _build(path, *args, **kwargs)
        with _lock:  # the second of equal tokenizers waits for the first
            shared = _tokenizers.get(digest)
            if shared is None:
                shared = _build(path, **kwargs)
                if not isinstance(shared, TokenizersBackend):
                    return shared
                if num_threads:
                    shared = maybe_make_thread_pool(shared, num_threads)
                type(shared).__copy__ = _same  # vLLM made the class for this object
                _tokenizers[digest] = shared
            return _same(shared)

    CachedHfTokenizer.from_pretrained = from_pretrained


def vocabulary_of(tokenizer: Any) -> Any:
    """Return the object that all tokenizers with this vocabulary share."""
    return vars(tokenizer).get("_shared", tokenizer)


def _same(tokenizer: Any) -> Any:
    """Return a tokenizer with the same vocabulary, and attributes of its own."""
    other = object.__new__(type(tokenizer))
    vars(other).update(vars(tokenizer), _shared=vocabulary_of(tokenizer))
    return other


def _digest(folder: Path, kwargs: dict[str, Any]) -> str | None:
    """Return a name for all that determines a tokenizer; None if it is not to be shared."""
    options = {key: value for key, value in kwargs.items() if key != "config"}  # of config.json
    try:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        if not files or any(fnmatch(file.name, _PROCESSORS) for file in files):
            return None
        found = hashlib.sha256(repr(sorted(options.items())).encode())
        for file in files:
            if any(fnmatch(file.name.lower(), pattern) for pattern in _FILES):
                name = str(file.relative_to(folder)).encode("utf-8", "surrogateescape")
                found.update(b"%s\0%s" % (name, hashlib.sha256(file.read_bytes()).digest()))
        fields = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    found.update(json.dumps([fields.get(name) for name in _FIELDS], sort_keys=True).encode())
    return found.hexdigest()
