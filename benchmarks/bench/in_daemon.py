"""Measurements inside the first worker of a private daemon, by ``benchmarks.in_worker``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpupoold.api.client import AdminClient
from gpupoold.domain import WarmSource

_DEVICE = 0


def bench_switch(
    client: AdminClient,
    models: tuple[str, str],
    rounds: int,
    modes: Sequence[WarmSource] = ("host_cached",),
    kv_bytes: int = 0,
    prompts: Sequence[int] = (),
) -> dict[str, Any]:
    """Alternate between two loaded models of an idle worker.

    Each mode is measured without live KV, then with at least ``kv_bytes`` of KV unless 0. The first
    token after a switch from host memory is measured for each number of prompt tokens in
    ``prompts``.

    Raises:
        Refused: the device is busy or too small.
    """
    for name in models:
        client.warm(name)
    arguments = {"models": models, "rounds": rounds, "modes": modes}
    arguments |= {"kv_bytes": kv_bytes, "prompts": prompts}
    return client.operate(_DEVICE, "bench_switch", arguments)


def bench_kv(
    client: AdminClient, models: tuple[str, str], rounds: int, kv_bytes: int
) -> dict[str, Any]:
    """Move ``kv_bytes`` of the first model's KV out and in, alone and beside the second's steps.

    Raises:
        Refused: the device is busy or too small.
    """
    for name in models:
        client.warm(name)
    arguments = {"models": models, "rounds": rounds, "kv_bytes": kv_bytes}
    return client.operate(_DEVICE, "bench_kv", arguments)


def bench_device(client: AdminClient, rounds: int) -> dict[str, Any]:
    """Measure mapping and copies.

    Raises:
        Refused: the device is busy or too small.
    """
    return client.operate(_DEVICE, "bench_device", {"rounds": rounds})


def leftovers(client: AdminClient) -> dict[str, Any]:
    """Return the memory still in use when all models are off the device.

    Raises:
        Refused: the device is busy.
    """
    return client.operate(_DEVICE, "leftovers", {})
