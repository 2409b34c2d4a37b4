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
    """A kind of GPU.

    ``pcie_bandwidth_bytes_per_s`` is the practical rate of host-to-device copies; if
    ``is_pcie_measured`` is false, the rate of another GPU with the same link. ``bf16_flops`` is
    dense.
    ``sources`` has a sentence for each field of ``NUMBERS`` and for ``host_link``.
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
    """Return all packaged profiles by name.

    Raises:
        DataError: the message names a GPU and a number without source.
    """
    text = resources.files("gpupoold.latency").joinpath("hardware.toml").read_text("utf-8")
    return {name: profile_from(name, entry) for name, entry in tomllib.loads(text).items()}


def hardware(name: str) -> HardwareProfile:
    """Return the profile of a GPU by its short name, or by the driver's name.

    Raises:
        DataError: the name is unknown; the message lists the known names.
    """
    profiles = hardware_profiles()
    wanted = name.casefold()
    for profile in profiles.values():
        if wanted in {known.casefold() for known in (profile.name, *profile.aliases)}:
            return profile
    raise DataError(f"no hardware profile {name!r}: there are {', '.join(profiles)}")


def profile_from(name: str, entry: Mapping[str, Any]) -> HardwareProfile:
    """Check one entry of the file and return its profile.

    Raises:
        DataError: a field or a number's source is missing, or a number is not positive.
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
