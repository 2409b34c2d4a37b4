"""The one reader of the files of checkpoints and adapters, all hostile until read.

Files are regular, of bounded size by kind, and inside of their folder; JSON is bounded in depth and
in the number of its values.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpupoold.checkpoints import layout
from gpupoold.errors import Refused
from gpupoold.regular_files import read_bounded, require_regular
from gpupoold.system.folders import hint_to_read
from gpupoold.units import format_bytes

MAX_TEMPLATE_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_VALUES = 1_000_000
"""Limit of commas and opening brackets in a JSON text, of which a parser makes objects."""
MAX_INDEX_VALUES = 2_000_000

# Limits by name; the first match counts. An index has about 110 bytes per tensor: that of a mixture
# of 384 experts in 61 layers with scales is 31 MB long.
_MAX_BYTES: tuple[tuple[str, int], ...] = (
    (layout.CONFIG_FILE, 1 << 20),
    (layout.ADAPTER_CONFIG_FILE, 1 << 20),
    ("*.index.json", 64 << 20),
    (".gpupool-download.json", 8 << 20),
    ("*.jinja", MAX_TEMPLATE_BYTES),
    ("tokenizer.json", 256 << 20),
    ("tekken.json", 256 << 20),
    ("vocab.*", 256 << 20),
    ("tokenizer.model*", 256 << 20),
    ("*.model", 256 << 20),
    ("*.tiktoken", 256 << 20),
    ("merges.txt", 256 << 20),
    ("*config*.json", 8 << 20),
    ("added_tokens.json", 8 << 20),
    ("special_tokens_map.json", 8 << 20),
    ("chat_template.json", 8 << 20),
    ("modules.json", 8 << 20),
    ("params.json", 8 << 20),
)
_READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py", "tokenizer.model*")
_MAX_NAMES = 100_000
_AGAIN = "download the file again"


def read_json(file: Path, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        Refused: the file cannot be read, exceeds a limit, or has no JSON object.
    """
    value = read_json_value(file, max_values)
    if not isinstance(value, dict):
        raise Refused(f"{file}: must hold a JSON object", _AGAIN)
    return value


def read_json_value(file: Path, max_values: int = MAX_VALUES) -> Any:
    """Return the JSON value in a file. Raises as :func:`read_json`."""
    data = read(file)
    if sum(map(data.count, (b",", b"[", b"{"))) > max_values:
        raise Refused(f"{file}: has more than {max_values:,} values", _AGAIN)
    try:
        value = json.loads(data.decode())
        depth = _depth(value)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{file}: is not valid JSON: {error}", _AGAIN) from error
    if depth > MAX_DEPTH:
        raise Refused(f"{file}: is nested more than {MAX_DEPTH} levels deep", _AGAIN)
    return value


def read(file: Path) -> bytes:
    """Return the content of a file, which must be regular and not too large for its kind.

    Raises:
        Refused: the file cannot be read or exceeds the limit.
    """
    try:
        return read_bounded(file, max_bytes(file.name) or MAX_TEMPLATE_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: OSError) -> Refused:
    """Return the error for a file that cannot be opened or read."""
    hint = hint_to_read(file) or "replace the file by one of the original checkpoint"
    return Refused(f"{file}: cannot be read: {error.strerror}", hint)


def max_bytes(name: str) -> int | None:
    """Return the limit of a file's size, None for weights and for files that nobody reads."""
    matches = (limit for pattern, limit in _MAX_BYTES if fnmatch.fnmatchcase(name, pattern))
    return next(matches, None)


def check_files(folder: Path) -> None:
    """Check kind, size and place of every file that is read, without reading.

    A link may leave the folder for the blobs of a Hugging Face cache, and for weights: other
    targets, such as another user's secrets, would become texts of the model.

    Raises:
        Refused: a file is not regular, too large, or a link to a file elsewhere.
    """
    real = os.path.realpath(folder)
    for file in _files(folder):
        try:
            found = os.stat(file)
            require_regular(file, found.st_mode)
        except OSError as error:
            raise unreadable(file, error) from error
        most = max_bytes(file.name)
        if most is not None and found.st_size > most:
            raise Refused(
                f"{file}: has {format_bytes(found.st_size)}, more than the allowed "
                f"{format_bytes(most)}",
                "use the original checkpoint's file",
            )
        target = os.path.realpath(file)
        if not (layout.is_weight_file(file.name) or _is_inside(target, real)):
            raise Refused(
                f"{file}: is a link to {target}, which is outside of the checkpoint",
                "replace the link by a copy of the file",
            )


def fingerprint(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return place, size, time of change and number of every file that is read.

    Raises:
        Refused: the folder cannot be read.
        OSError: a file cannot be examined.
    """
    return tuple(
        (str(file), found.st_size, found.st_mtime_ns, found.st_ino)
        for file in sorted(_files(folder))
        for found in (os.stat(file),)
    )


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of the folder, and of folders one level deeper, that anybody reads."""
    num_names = 0
    for parent in (folder, *_subfolders(folder)):
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    num_names += 1
                    if num_names > _MAX_NAMES:
                        raise Refused(f"{folder}: has more than {_MAX_NAMES:,} files")
                    is_read = any(fnmatch.fnmatchcase(entry.name, one) for one in _READ)
                    if (is_read or layout.is_weight_file(entry.name)) and not _is_folder(entry):
                        yield Path(entry.path)
        except OSError as error:
            raise unreadable(parent, error) from error


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders from which files are read: templates, and sentence-transformers'."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if (entry.name == layout.TEMPLATE_FOLDER or entry.name[:1].isdigit())
                and _is_folder(entry)
            )
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISDIR(entry.stat().st_mode)
    except OSError:
        return False


def _is_inside(target: str, folder: str) -> bool:
    if os.path.commonpath([target, folder]) == folder:
        return True
    blobs = os.path.dirname(target)
    repository = os.path.basename(os.path.dirname(blobs))
    return os.path.basename(blobs) == "blobs" and repository.startswith(("models--", "adapters--"))


def _depth(value: Any) -> int:
    """Return the number of nested containers, without recursion."""
    depth, level = 0, [value]
    while level := [
        item
        for one in level
        if isinstance(one, dict | list)
        for item in (one.values() if isinstance(one, dict) else one)
    ]:
        depth += 1
    return depth
