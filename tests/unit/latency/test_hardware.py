"""Every number about a GPU has a source."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

import pytest

from gpupoold.latency.shape import NUMBERS, DataError, hardware, hardware_profiles, profile_from

WANTED = {"A10", "A100-40", "A100-80", "H100", "H800", "H200", "H20", "L40S", "RTX 4090"}


def entry(name: str) -> dict[str, Any]:
    text = resources.files("gpupoold.latency").joinpath("hardware.toml").read_text("utf-8")
    found: dict[str, Any] = tomllib.loads(text)[name]
    return found


def test_the_wanted_gpus_are_there() -> None:
    assert hardware_profiles().keys() == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_number_has_a_source_and_a_plausible_unit(name: str) -> None:
    profile = hardware(name)
    assert set(profile.sources) == {*NUMBERS, "host_link"}
    assert all(len(text) > 15 for text in profile.sources.values())
    assert 20 * 2**30 < profile.memory_bytes < 150 * 2**30
    assert 5e11 < profile.memory_bandwidth_bytes_per_s < 5e12
    assert 1e14 < profile.bf16_flops < 1e15
    link = {"PCIe 4.0 x16": 32e9, "PCIe 5.0 x16": 64e9}[profile.host_link]
    assert 0.5 * link < profile.pcie_bandwidth_bytes_per_s < 0.9 * link
    taken_over = "taken over" in profile.sources["pcie_bandwidth_bytes_per_s"]
    assert taken_over is not profile.is_pcie_measured


def test_names_are_found_as_the_driver_writes_them() -> None:
    assert hardware("NVIDIA H100 80GB HBM3") is hardware("h100")
    assert hardware("rtx4090").name == "RTX 4090"
    names = [
        known.casefold()
        for profile in hardware_profiles().values()
        for known in (profile.name, *profile.aliases)
    ]
    assert len(names) == len(set(names))


def test_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(DataError, match=r"'B9000'.*A10, .*RTX 4090"):
        hardware("B9000")


@pytest.mark.parametrize("key", [*NUMBERS, "host_link", "is_pcie_measured"])
def test_missing_number_is_named(key: str) -> None:
    broken = {name: value for name, value in entry("A10").items() if name != key}
    with pytest.raises(DataError, match=rf"\[A10\] has no {key}"):
        profile_from("A10", broken)


@pytest.mark.parametrize("key", [*NUMBERS, "host_link"])
def test_number_without_source_is_named(key: str) -> None:
    broken = entry("A10")
    del broken["sources"][key]
    with pytest.raises(DataError, match=rf"no source for {key}"):
        profile_from("A10", broken)


def test_number_that_is_not_positive_is_named() -> None:
    with pytest.raises(DataError, match="bf16_flops must be positive, got 0"):
        profile_from("A10", entry("A10") | {"bf16_flops": 0})
