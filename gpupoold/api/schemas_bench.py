"""Bodies of the admin API for measurements."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpupoold.api.schemas import Body
from gpupoold.domain import WarmSource


class BenchSwitchRequest(Body):
    """Body of ``POST /bench/switch``: alternate between two loaded models on an idle worker.

    Each mode is measured without live KV, then with at least ``kv_bytes`` of KV unless 0. The first
    token after a switch from host memory is measured for each number of prompt tokens in
    ``prompts``.
    """

    models: tuple[str, str]
    rounds: int = Field(default=20, gt=0, le=10_000)
    modes: tuple[WarmSource, ...] = Field(default=("host_cached",), min_length=1)
    kv_bytes: int = Field(default=0, ge=0)
    prompts: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(), max_length=8)


class BenchMemoryRequest(Body):
    """``POST /bench/memory``: measure on an idle worker.

    ``device``: mapping and copies. ``kv``: ``kv_bytes`` of the first model's KV out and in,
    alone and beside the second model's steps. ``leftovers``: the memory still in use when
    all models are off the device.
    """

    part: Literal["device", "kv", "leftovers"]
    models: tuple[str, str] | None = None
    rounds: int = Field(default=20, gt=0, le=10_000)
    kv_bytes: int = Field(default=128 << 20, gt=0)
