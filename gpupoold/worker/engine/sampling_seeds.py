"""Equal random numbers on all ranks of a group.

Every rank samples, from equal logits. Requests without a seed draw from torch's generator of the
process, whose state depends on all engines. So the leader seeds each sampling.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm.platforms import current_platform


def seed_sampling(seed: int) -> None:
    """Set the state of torch's generators before a step samples."""
    torch.manual_seed(seed)


def keep_generators() -> None:
    """Keep vLLM's loads, which run beside steps, from seeding the generators of the process."""
    # The CPU worker's module must not be imported for a GPU, see ``emulated_worker``.
    name = "gpu_worker" if current_platform.is_cuda() else "cpu_worker"
    module = importlib.import_module(f"vllm.v1.worker.{name}")
    setattr(module, "set_random_seed", _do_nothing)  # noqa: B010


def _do_nothing(*_: Any) -> None:
    """Stand for a function that is not wanted."""
