"""Checkpoints of real shapes with random weights, written at the speed of memory.

    python -m benchmarks.gpu.synthetic DIR 8B [--dry-run]

A block of normal numbers is drawn once. Every tensor is a scaled copy of the block, begun at a
different offset, so that 8B weights take seconds and not minutes. The block's length is a prime, so
no two rows of a matrix are equal. Greedy text is printable and varies.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.shapes import SHAPES, TINY_SHAPES, Shape, Tensor, config, tensors
from gpupoold.checkpoints.maker import whole_folder, write_metadata
from gpupoold.checkpoints.tiny_tokenizer import VOCAB_SIZE, write_tokenizer
from gpupoold.errors import GpupoolError, UsageError

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

RECIPE_FILE = "gpupool_synthetic.json"
BLOCK_ELEMENTS = 16_777_213  # the largest prime below 2**24
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_MAX_WRITERS = 16


def make_synthetic(parent: Path, shape: Shape) -> Path:
    """Make (or keep, if it is there already) ``parent/synthetic-NAME``.

    Raises:
        UsageError: no folder can be made there.
        OSError: no room.
    """
    target = parent / f"synthetic-{shape.name.lower()}"
    parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another piece may be making it
        if not weights_of(target).exists():
            _make(target, shape)
    return target


def _make(target: Path, shape: Shape) -> None:
    with whole_folder(target) as folder:
        silent_ids = write_tokenizer(folder)
        write_weights(weights_of(folder), shape, silent_ids)
        recipe = {"shape": shape.name, "of": shape.of}
        write_metadata(folder, config(shape), RECIPE_FILE, recipe)
        _tie(folder / "config.json", is_tied=shape.is_tied)


def weights_of(folder: Path) -> Path:
    """The checkpoint's file with the tensors."""
    return folder / "model.safetensors"


def header(found: Sequence[Tensor]) -> bytes:
    """How a safetensors file of these tensors begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in found:
        begin, end = end, end + tensor.num_bytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        entries[tensor.name] = entry
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def cuts(num_elements: int, start: int, block_elements: int) -> Iterator[tuple[int, int, int]]:
    """``(first element of the tensor, first of the block, how many)``, from ``start`` on."""
    done, at = 0, start % block_elements
    while done < num_elements:
        length = min(num_elements - done, block_elements - at)
        yield done, at, length
        done, at = done + length, 0


def write_weights(path: Path, shape: Shape, silent_ids: Sequence[int]) -> None:
    """All tensors, by as many threads as there are cores.

    Tables have zeros for ``silent_ids`` and for what no tokenizer knows: greedy text has none
    of them. Written through a mapping: threads that write to one file wait for each other.
    """
    found = tensors(shape)
    begin = header(found)
    most = max(math.prod(tensor.shape) for tensor in found)
    blocks = _Blocks(min(BLOCK_ELEMENTS, most))
    with path.open("w+b") as file:
        file.write(begin)
        file.truncate(len(begin) + sum(tensor.num_bytes for tensor in found))
        data = np.memmap(file, np.uint8, "r+")
        tasks: list[partial[None]] = []
        at = len(begin)
        for tensor in found:
            end = at + tensor.num_bytes
            tasks += _tasks(data[at:end], blocks.of(tensor), tensor, silent_ids)
            at = end
        with ThreadPoolExecutor(min(_MAX_WRITERS, os.cpu_count() or 1)) as threads:
            for done in [threads.submit(task) for task in tasks]:
                done.result()
        # No flush to disk: later mappings see the bytes, and the file need not survive a crash.


class _Blocks:
    """The block of normal numbers in every scale there is."""

    def __init__(self, num_elements: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._normal = torch.randn(num_elements, generator=generator)
        self._scaled: dict[tuple[float, float, str], torch.Tensor] = {}

    def of(self, tensor: Tensor) -> torch.Tensor:
        """The block in ``tensor``'s scale."""
        import torch

        dtypes = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
        key = (tensor.std, tensor.mean, tensor.dtype)
        if key not in self._scaled:
            scaled = self._normal.mul(tensor.std).add_(tensor.mean)
            self._scaled[key] = scaled.to(dtypes[tensor.dtype])
        return self._scaled[key]


def _tasks(
    place: Bytes, block: torch.Tensor, tensor: Tensor, silent_ids: Sequence[int]
) -> Iterator[partial[None]]:
    """What threads do to fill ``place``, a tensor's part of the file."""
    start, num_elements = zlib.crc32(tensor.name.encode()), math.prod(tensor.shape)
    if tensor.name in _TABLES:
        # At another offset: an output table equal to the input table would repeat the last token.
        own = block.roll(-(start % len(block)))
        yield partial(_write_table, place, own, tensor.shape[1], silent_ids)
        return
    source = _bytes_of(block)
    for cut in cuts(num_elements, start, len(block)):
        first, taken, length = (tensor.element_bytes * elements for elements in cut)
        yield partial(np.copyto, place[first : first + length], source[taken : taken + length])


def _write_table(place: Bytes, block: torch.Tensor, width: int, silent_ids: Sequence[int]) -> None:
    """The rows of tokens; the rest of the file stays a hole, which reads as zeros."""
    num_elements = VOCAB_SIZE * width
    table = block.repeat(-(-num_elements // len(block)))[:num_elements].view(VOCAB_SIZE, width)
    table = table.clone()
    table[list(silent_ids)] = 0
    known = _bytes_of(table.view(-1))
    np.copyto(place[: len(known)], known)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    import torch

    found: Bytes = tensor.view(torch.uint8).numpy()
    return found


def _tie(path: Path, *, is_tied: bool) -> None:
    known = json.loads(path.read_text("utf-8")) | {"tie_word_embeddings": is_tied}
    path.write_text(json.dumps(known, indent=2) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path, help="folder below which the checkpoint is made")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--dry-run", action="store_true", help="the same in small")
    args = parser.parse_args(argv)
    shapes = TINY_SHAPES if args.dry_run else SHAPES
    try:
        print(make_synthetic(args.dir, shapes[args.shape]))
    except (GpupoolError, OSError) as error:
        problem = error if isinstance(error, GpupoolError) else UsageError(f"{args.dir}: {error}")
        print(problem, file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
