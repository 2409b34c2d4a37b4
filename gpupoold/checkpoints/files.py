"""The one reader of the files of checkpoints and adapters, all hostile until read.

Reads JSON, and the header of a safetensors file without the tensor data.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpupoold.checkpoints import layout
from gpupoold.errors import Refused
from gpupoold.files import hint_to_read, opened, read_bounded, require_regular
from gpupoold.units import format_bytes

MAX_HEADER_BYTES = 32 << 20
"""Enough for 240,000 tensors in one file; a mixture of 384 experts in 61 layers has that many."""
MAX_TENSORS = 1_000_000
"""Limit over all files of a checkpoint."""
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E8M0": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_REFETCH = "download or copy this file again"

_NOT_OF_STEPS = {
    "_name_or_path",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
}

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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A header entry; ``begin`` and ``end`` are byte offsets in the data."""

    name: str
    dtype: str
    num_elements: int
    begin: int
    end: int
    shape: tuple[int, ...] = ()


class Beginning(NamedTuple):
    """The first bytes of a file that is elsewhere, in the file ``path``."""

    path: Path
    file_bytes: int
    """Size of the whole file."""


def read_tensors(path: Path, beginning: Beginning | None = None) -> tuple[TensorEntry, ...]:
    """Return the tensors in the file, in the order of their data.

    A safetensors file is ``u64 header length | JSON header | data``; the header gives each tensor's
    dtype, shape and byte range in the data. The ranges must cover the data exactly, without holes
    or overlaps, so that a truncated or patched file cannot pass.

    With ``beginning`` the file itself is not read, and ``path`` is its name in messages. Raises
    Refused: the file cannot be read, is truncated or damaged, or is not a safetensors file; the
    message names the file, and both sizes of a truncated file.
    """
    try:
        header, data_bytes, file_bytes = _read_header(path, beginning)
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from error
    try:
        tensors = [_tensor(name, entry, data_bytes) for name, entry in header.items()]
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _require_exact_cover(path, tensors, data_bytes, file_bytes)
    return tuple(tensors)


def elements_by_dtype(tensors: Iterable[TensorEntry]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_elements
    return counts


def header_end(start: bytes) -> int:
    """Return the number of bytes before the data, as a file's first bytes state."""
    return _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")


def _read_header(path: Path, beginning: Beginning | None) -> tuple[dict[str, object], int, int]:
    """Return the JSON header without its metadata, and the bytes of the data and the file."""
    with opened(beginning.path if beginning else path) as file:
        file_bytes = beginning.file_bytes if beginning else os.fstat(file.fileno()).st_size
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise Refused(
                f"{path}: is a Git LFS pointer, not the weights themselves",
                "run `git lfs pull` in that folder",
            )
        if file_bytes < _LENGTH_BYTES:
            raise _damaged(path, f"has {file_bytes} bytes, less than the smallest header")
        header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise _damaged(path, f"claims a header of {header_bytes} bytes; is it safetensors?")
        if header_bytes > file_bytes - _LENGTH_BYTES:
            raise _truncated(path, file_bytes, _LENGTH_BYTES + header_bytes, "for its header alone")
        file.seek(_LENGTH_BYTES)
        text = file.read(header_bytes)
    return _parse_header(path, text), file_bytes - _LENGTH_BYTES - header_bytes, file_bytes


def _parse_header(path: Path, text: bytes) -> dict[str, object]:
    try:
        if not text.startswith(b"{"):
            raise ValueError("the header does not start with '{'")
        # A tensor takes two brackets and five commas.
        if sum(map(text.count, (b",", b"[", b"{"))) > 10 * MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS:,} tensors")
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
        metadata = header.pop("__metadata__", None)
        is_table = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        if metadata is not None and not is_table:
            raise ValueError("__metadata__ is not a table of texts")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is not readable: {error}") from error
    return dict(header)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a name occurs twice")
    return keys


def _tensor(name: str, entry: object, data_bytes: int) -> TensorEntry:
    """Return an entry after checking it; raise ValueError with the tensor's name."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: dtype, shape and data_offsets expected")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"tensor {name!r}: unknown dtype {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: shape and data_offsets must be lists of numbers")
    begin, end = offsets
    if begin > end:
        raise ValueError(f"tensor {name!r}: ends at {end}, before its begin at {begin}")
    num_elements = _product(shape, limit=2 * max(end - begin, data_bytes) + 1)
    num_bits = num_elements * DTYPE_BITS[dtype]
    if num_bits != 8 * (end - begin):
        raise ValueError(
            f"tensor {name!r}: {dtype} of shape {_short(shape)} does not take {end - begin} bytes"
        )
    return TensorEntry(name, dtype, num_elements, begin, end, tuple(shape))


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
        for value in values
    )


def _product(shape: list[int], limit: int) -> int:
    """Return the product, or a number above ``limit``: a damaged shape can be astronomic."""
    if 0 in shape:
        return 0
    product = 1
    for size in shape:
        product *= size
        if product > limit:
            break
    return product


def _short(shape: list[int]) -> str:
    return str(shape) if len(shape) <= 8 else f"[{', '.join(map(str, shape[:8]))}, ...]"


def _require_exact_cover(
    path: Path, tensors: list[TensorEntry], data_bytes: int, file_bytes: int
) -> None:
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            problem = "overlaps the previous tensor" if tensor.begin < position else "leaves a hole"
            raise _damaged(
                path,
                f"tensor {tensor.name!r} begins at byte {tensor.begin} of the data, "
                f"expected {position}: the tensor {problem}",
            )
        position = tensor.end
    if position > data_bytes:
        raise _truncated(path, file_bytes, file_bytes - data_bytes + position, "for its tensors")
    if position < data_bytes:
        raise _damaged(path, f"has {data_bytes - position} bytes after the last tensor")


def _damaged(path: Path, problem: str) -> Refused:
    return Refused(f"{path}: damaged safetensors file: {problem}", _REFETCH)


def _truncated(path: Path, actual: int, expected: int, what: str) -> Refused:
    return Refused(
        f"{path}: cut short: {actual} bytes ({format_bytes(actual)}), but {expected} "
        f"({format_bytes(expected)}) are needed {what}",
        _REFETCH,
    )


def config_of_steps(folder: Path) -> str:
    """Return ``config.json`` without names and token ids, equal for fine-tunes of one model.

    Raises Refused: as ``read_json``.
    """
    config = read_json(folder / layout.CONFIG_FILE)
    kept = {k: v for k, v in config.items() if k not in _NOT_OF_STEPS and v is not None}
    return json.dumps([kept, (folder / layout.MODULES_FILE).exists()], sort_keys=True)


def read_json(file: Path, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Files are regular, of bounded size by kind, and inside of their folder; JSON is bounded in depth
    and in the number of its values. Raises Refused: the file cannot be read, exceeds a limit, or
    has no JSON object.
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

    Raises Refused: the file cannot be read or exceeds the limit.
    """
    try:
        return read_bounded(file, max_bytes(file.name) or MAX_TEMPLATE_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: OSError) -> Refused:
    hint = hint_to_read(file) or "replace the file by one of the original checkpoint"
    return Refused(f"{file}: cannot be read: {error.strerror}", hint)


def max_bytes(name: str) -> int | None:
    """Return the limit of a file's size, None for weights and for files that nobody reads."""
    matches = (limit for pattern, limit in _MAX_BYTES if fnmatch.fnmatchcase(name, pattern))
    return next(matches, None)


def check_files(folder: Path) -> None:
    """Check kind, size and place of every file that is read, without reading.

    A link may leave the folder for the blobs of a Hugging Face cache, and for weights: other
    targets, such as another user's secrets, would become texts of the model. Raises Refused: a file
    is not regular, too large, or a link to a file elsewhere.
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
                    is_read = any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in _READ)
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
