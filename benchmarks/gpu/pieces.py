"""The pieces of a run on a GPU, the most important first, and their shares of the time. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from gpupoold.errors import UsageError

# Devices for a dry run: an emulated device, or a GPU's driver.
DRY_KINDS = ("emulated", "cuda")
# GPUs of a group, the most first: the degrees that every measured shape can be divided by.
_GROUP_SIZES = (8, 4, 2)
# Emulated GPUs of a group in a dry run.
_DRY_GROUP_SIZE = 2
# Time reserved for the runner: the end of a piece, the results, the archive of logs.
KEPT_S = 8.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A process of the run. ``arguments`` are words after ``python3 -m``.

    With less than ``least_s`` left it is not begun; ``limit_s`` is the most it gets, and it is
    interrupted ``interrupt_s`` before its time is over, to write what it has. ``num_groups`` is the
    number of groups of GPUs that the piece needs, 0 for one GPU alone.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    least_s: float
    in_dry_run: bool = True
    interrupt_s: float = 0.0
    num_groups: int = 0


TESTS = Piece(
    "tests",
    ("pytest", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "-q"),
    limit_s=180.0,
    least_s=20.0,
    interrupt_s=10.0,
)


def _of(module: str, *options: str) -> tuple[str, ...]:
    return (f"benchmarks.gpu.{module}", *options)


PIECES = (
    Piece("switch-8B", _of("switch", "--shape", "8B"), 170.0, 60.0),
    Piece("device", _of("device"), 60.0, 15.0),
    Piece("busy", _of("busy"), 40.0, 15.0),
    Piece("sleep-8B", _of("sleep", "--shape", "8B"), 100.0, 45.0),
    Piece("streams", _of("streams"), 230.0, 60.0),
    Piece("overhead", _of("overhead"), 230.0, 90.0),
    Piece("overhead-1B", _of("overhead", "--shape", "1B"), 230.0, 90.0, False),
    Piece("defaults-8B", _of("defaults", "--shape", "8B"), 240.0, 60.0),
    Piece("mixed-gpupool", _of("mixed", "--policy", "gpupool"), 300.0, 150.0),
    Piece("mixed-request-level", _of("mixed", "--policy", "request-level"), 300.0, 150.0, False),
    Piece("decode-layouts", _of("decode_layouts"), 150.0, 70.0),
    Piece("group-start", _of("group_start"), 120.0, 30.0, num_groups=1),
    Piece("group-tokens", _of("group_tokens"), 240.0, 90.0, num_groups=1),
    Piece("group-switch-8B", _of("switch", "--shape", "8B"), 200.0, 60.0, False, num_groups=1),
    Piece("group-overhead", _of("overhead"), 300.0, 120.0, False, num_groups=1),
    Piece("group-kill", _of("group_streams", "kills"), 240.0, 60.0, num_groups=1),
    Piece("group-migration", _of("group_streams", "migrations"), 240.0, 60.0, False, num_groups=2),
    *(
        piece
        for shape in ("1B", "14B", "3B")
        for piece in (
            Piece(f"switch-{shape}", _of("switch", "--shape", shape), 200.0, 50.0, False),
            Piece(f"sleep-{shape}", _of("sleep", "--shape", shape), 90.0, 40.0, False),
        )
    ),
)


def chosen(only: Sequence[str], *, is_dry: bool) -> list[Piece]:
    """The pieces of these names in the order that was asked for, or all there are.

    Raises:
        UsageError: there is no piece of such a name.
    """
    known = {piece.name: piece for piece in (TESTS, *PIECES)}
    if unknown := [name for name in only if name not in known]:
        raise UsageError(f"no piece {unknown[0]!r}", f"choose of {', '.join(known)}")
    if only:
        return [known[name] for name in only]
    return [piece for piece in known.values() if piece.in_dry_run or not is_dry]


def allotted_s(piece: Piece, left_s: float, *, is_last: bool = False) -> float | None:
    """Seconds for a piece when the run has so many left; None when they are too few.

    The last piece need not leave any.
    """
    usable_s = left_s - KEPT_S
    if usable_s < piece.least_s:
        return None
    return usable_s if is_last else min(piece.limit_s, usable_s)


def group_size(piece: Piece, num_gpus: int, *, is_emulated: bool) -> int:
    """GPUs of each of the piece's groups, of so many in the machine; 0 when they are too few.

    The groups are as large as they can be. A piece without groups has one GPU.
    """
    if not piece.num_groups:
        return 1
    if is_emulated:
        return _DRY_GROUP_SIZE
    sizes = (size for size in _GROUP_SIZES if size * piece.num_groups <= num_gpus)
    return next(sizes, 0)


def why_too_few(piece: Piece, num_gpus: int) -> str:
    """The reason in the results, when ``group_size`` is 0."""
    return (
        f"needs {piece.num_groups * min(_GROUP_SIZES)} NVIDIA GPUs, and this machine has {num_gpus}"
    )


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """The option of that name: what a dry run is made on, or nothing."""
    parser.add_argument(
        "--dry-run",
        nargs="?",
        choices=DRY_KINDS,
        const=DRY_KINDS[0],
        help="in small, on an emulated device, or on the GPU's driver (default: %(const)s)",
    )
