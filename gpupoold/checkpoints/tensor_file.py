"""Reading and checking the header of a safetensors file, without the tensor data.

A file is ``u64 header length | JSON header | data``; the header gives each tensor's dtype, shape
and byte range in the data. The ranges must cover the data exactly, without holes or overlaps, so
that a truncated or patched file cannot pass.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpupoold.errors import Refused
from gpupoold.regular_files import opened
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

    With ``beginning`` the file itself is not read, and ``path`` is its name in messages.

    Raises:
        Refused: the file cannot be read, is truncated or damaged, or is not a safetensors file;
            the message names the file, and both sizes of a truncated file.
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
    """Return the number of elements of each dtype."""
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
