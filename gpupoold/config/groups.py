"""Checks of groups of GPUs against the GPUs of the machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from gpupoold.config.machine import DeviceFacts, MachineError
from gpupoold.units import format_bytes


def check_groups(devices: Iterable[DeviceFacts]) -> None:
    """Check that the GPUs of each group are there, and are alike.

    Each GPU holds an equal part of a model, so the smallest and slowest sets the size and the pace.
    Facts that are unknown agree with all.

    Raises:
        MachineError: a group fails the check.
    """
    for number, members in groupby(devices, key=lambda one: one.device):
        group = list(members)
        if len(group) > 1:
            _check_group(f"device[{number}].gpus", group)


def _check_group(key: str, group: list[DeviceFacts]) -> None:
    for one in group:
        if one.is_missing:
            raise MachineError(
                key, f"there is no GPU {one.ordinal}", "name GPUs that `nvidia-smi -L` lists"
            )
    first = group[0]
    for one in group[1:]:
        if one.name != first.name and one.name and first.name:
            what = f"GPU {first.ordinal} is {first.name}, and GPU {one.ordinal} is {one.name}"
        elif one.memory_bytes != first.memory_bytes and one.memory_bytes and first.memory_bytes:
            what = (
                f"GPU {first.ordinal} has {format_bytes(first.memory_bytes)}, and GPU "
                f"{one.ordinal} has {format_bytes(one.memory_bytes)}"
            )
        else:
            continue
        raise MachineError(key, f"{what}: the GPUs of a group must be alike", "group like GPUs")
