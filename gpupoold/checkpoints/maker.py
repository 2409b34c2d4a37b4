"""Common parts of the programs that make checkpoints: folders, metadata, the command line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, PAD_ID
from gpupoold.errors import GpupoolError, UsageError

_ENDS = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_COMMON_CONFIG = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    **_ENDS,
}


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` at the end, and is removed after a failure.

    Raises UsageError: the folder cannot be created.
    """
    scratch = target.parent / f".{target.name}.{os.getpid()}"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        problem = f"{target.parent}: cannot create a folder: {error.strerror}"
        raise UsageError(problem, "choose another folder") from error
    try:
        yield scratch
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_metadata(
    folder: Path, config: Mapping[str, Any], recipe_file: str, recipe: Mapping[str, Any]
) -> None:
    """Write ``config.json`` with the common additions, and the small files.

    ``recipe_file`` gets ``recipe``, which identifies the folder later.
    """
    for name, content in (
        ("config.json", {**config, **_COMMON_CONFIG}),
        ("generation_config.json", _ENDS),
        (recipe_file, recipe),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def maker_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of a command line with ``dir`` and ``--json``."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("dir", type=Path, help="folder below which the checkpoints are made")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    return parser


def print_made(
    paths: Iterable[Path], file_bytes: Callable[[os.stat_result], int], *, as_json: bool
) -> int:
    """Print one line per finished checkpoint, errors to stderr; return the exit code.

    ``file_bytes`` returns a file's contribution to ``size_bytes``.
    """
    try:
        for path in paths:
            full = path.resolve()
            size_bytes = sum(file_bytes(file.stat()) for file in full.iterdir())
            made = {"name": full.name, "path": str(full), "size_bytes": size_bytes}
            print(json.dumps(made) if as_json else full, flush=True)
    except GpupoolError as error:
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        print(json.dumps(fields) if as_json else error, file=sys.stderr)
        return error.exit_code
    return 0
