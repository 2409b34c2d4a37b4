"""Facts about GPUs, read from ``hardware.toml``; no number is in code."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from gpupoold.latency.errors import DataError

NUMBERS = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "bf16_flops",
    "pcie_bandwidth_bytes_per_s",
)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One kind of GPU.

    ``pcie_bandwidth_bytes_per_s`` is what host-to-device copies reach in practice; where
    ``is_pcie_measured`` is false it was taken over from a GPU with the same link.
    ``bf16_flops`` is dense. ``sources`` has a sentence for each field of ``NUMBERS`` and
    for ``host_link``.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    bf16_flops: float
    pcie_bandwidth_bytes_per_s: float
    is_pcie_measured: bool
    host_link: str
    aliases: tuple[str, ...]
    sources: Mapping[str, str]


@cache
def hardware_profiles() -> dict[str, HardwareProfile]:
    """All packaged profiles by name.

    Raises:
        DataError: naming the GPU and the number that lacks its source.
    """
    text = resources.files("gpupoold.latency").joinpath("hardware.toml").read_text("utf-8")
    return {name: profile_from(name, entry) for name, entry in tomllib.loads(text).items()}


def hardware(name: str) -> HardwareProfile:
    """The profile of a GPU by its short name, or by the one the driver gives it.

    Raises:
        DataError: there is none of that name; the message lists those there are.
    """
    profiles = hardware_profiles()
    wanted = name.casefold()
    for profile in profiles.values():
        if wanted in {known.casefold() for known in (profile.name, *profile.aliases)}:
            return profile
    raise DataError(f"no hardware profile {name!r}: there are {', '.join(profiles)}")


def profile_from(name: str, entry: Mapping[str, Any]) -> HardwareProfile:
    """One entry of the file, checked.

    Raises:
        DataError: a field or the source of a number is missing, or a number is not positive.
    """
    sources = entry.get("sources", {})
    for key in (*NUMBERS, "host_link", "is_pcie_measured"):
        if key not in entry:
            raise DataError(f"hardware.toml: [{name}] has no {key}")
        if key != "is_pcie_measured" and not sources.get(key):
            raise DataError(f"hardware.toml: [{name}.sources] has no source for {key}")
    for key in NUMBERS:
        if entry[key] <= 0:
            raise DataError(f"hardware.toml: [{name}] {key} must be positive, got {entry[key]}")
    return HardwareProfile(
        name=name,
        memory_bytes=int(entry["memory_bytes"]),
        memory_bandwidth_bytes_per_s=float(entry["memory_bandwidth_bytes_per_s"]),
        bf16_flops=float(entry["bf16_flops"]),
        pcie_bandwidth_bytes_per_s=float(entry["pcie_bandwidth_bytes_per_s"]),
        is_pcie_measured=bool(entry["is_pcie_measured"]),
        host_link=str(entry["host_link"]),
        aliases=tuple(entry.get("aliases", ())),
        sources=MappingProxyType(dict(sources)),
    )
