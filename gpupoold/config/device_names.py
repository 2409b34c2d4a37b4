"""Names of devices, the short form in the configuration, and checks of devices. Pure."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

from gpupoold.latency.shape import MAX_GROUP_GPUS, LatencyError, hardware

_MAX_INDEX = 1023
_SIM_DEVICES = re.compile(
    r"(?:(?P<count>[1-9]\d{0,2})x)?(?:(?P<gpus>[1-9]\d{0,2})x)?(?P<gpu>[A-Za-z][\w .-]*)"
)
_CUDA_RANGE = re.compile(r"(?P<first>\d{1,4})-(?P<last>\d{1,4})")


def named_devices(names: object, has_tables: bool) -> list[dict[str, object]]:
    """Convert ``devices``, the short form, to the tables of ``[[device]]``.

    Raises ValueError: not a list of known names, or ``has_tables``, when the file has both forms.
    """
    if has_tables:
        raise ValueError("write either devices or [[device]], not both")
    if not isinstance(names, list) or not names:
        raise ValueError('write a list such as ["cuda:0", "cuda:1"] or ["sim:16xH800"]')
    return [device for name in names for device in _named_device(name)]


def check_gpu(kind: str, gpu: str | None) -> None:
    """Check that devices of kind ``sim`` name a known GPU, and other devices no GPU."""
    if kind != "sim":
        if gpu is not None:
            raise ValueError('gpu is for kind = "sim" only')
        return
    if gpu is None:
        raise ValueError('kind = "sim" needs gpu, such as "H800"')
    try:
        hardware(gpu)
    except LatencyError as error:
        raise ValueError(str(error)) from error


def group_value(value: object) -> object:
    """Check ``gpus`` of a device: a list of CUDA ordinals, or a number of GPUs.

    Raises ValueError: neither, more than ``MAX_GROUP_GPUS``, or a GPU is named twice.
    """
    if isinstance(value, list | tuple):
        count = len(value)
        if not all(_is_whole(index) and 0 <= index <= _MAX_INDEX for index in value):
            raise ValueError(f"write ordinals from 0 to {_MAX_INDEX}, such as [0, 1, 2, 3]")
        if len(set(value)) < count:
            raise ValueError("names a GPU twice")
        value = tuple(value)
    elif _is_whole(value):
        count = int(str(value))
    else:
        raise ValueError("write a list of GPUs such as [0, 1, 2, 3], or a number of GPUs")
    if not 1 <= count <= MAX_GROUP_GPUS:
        raise ValueError(f"a group has 1 to {MAX_GROUP_GPUS} GPUs, not {count}")
    return value


def check_group(kind: str, gpus: tuple[int, ...] | int | None, index: int | None) -> None:
    """Check that ``gpus`` is a list on CUDA devices, beside no index, and a number on others."""
    if gpus is None:
        return
    if kind != "cuda" and not isinstance(gpus, int):
        raise ValueError(f'gpus of kind = "{kind}" is a number of GPUs, such as 2')
    if kind == "cuda" and isinstance(gpus, int):
        raise ValueError('gpus of kind = "cuda" is a list of ordinals, such as [0, 1]')
    if index is not None:
        raise ValueError("index and gpus exclude each other: gpus lists all GPUs of the device")


def numbered(gpus: Sequence[tuple[int, ...] | None], has_memory: Sequence[bool]) -> list[int]:
    """Return the lowest ordinals without a device, for each None in ``gpus`` in turn.

    ``gpus`` has the ordinals of each CUDA device; ``has_memory`` tells whether the device states
    its memory, which lets single GPUs be shared. Raises ValueError: devices have a GPU in common
    that they cannot share.
    """
    uses = Counter(index for named in gpus for index in named or ())
    for named, has_size in zip(gpus, has_memory, strict=True):
        shared = [index for index in named or () if uses[index] > 1]
        if shared and len(named or ()) > 1:
            raise ValueError(f"GPU {shared[0]} is in two devices: a group has its GPUs alone")
        if shared and not has_size:
            raise ValueError("two devices have the same index: give each device memory to share it")
    free = (index for index in itertools.count() if index not in uses)
    return list(itertools.islice(free, sum(named is None for named in gpus)))


def _named_device(name: object) -> list[dict[str, object]]:
    kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind == "cuda" and rest.isdecimal():
        return [{"kind": kind, "index": int(rest)}]
    if kind == "cuda" and (match := _CUDA_RANGE.fullmatch(rest)):
        return [{"kind": kind, "gpus": _range(str(name), int(match["first"]), int(match["last"]))}]
    if kind in ("cuda", "emulated") and name == kind:
        return [{"kind": kind}]
    match = _SIM_DEVICES.fullmatch(rest)
    if kind != "sim" or match is None:
        raise ValueError(
            f'{name!r} is not a device: write "cuda", "cuda:0", "cuda:0-3", "emulated", '
            '"sim:H800", "sim:16xH800" or "sim:2x4xH800"'
        )
    check_gpu(kind, match["gpu"])
    group = {} if match["gpus"] is None else {"gpus": int(match["gpus"])}
    return [{"kind": kind, "gpu": match["gpu"]} | group for _ in range(int(match["count"] or 1))]


def _range(name: str, first: int, last: int) -> list[int]:
    if not first < last < first + MAX_GROUP_GPUS:
        raise ValueError(
            f"{name!r}: write the first and the last GPU of 2 to {MAX_GROUP_GPUS}, such as "
            '"cuda:0-3"'
        )
    return list(range(first, last + 1))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
