"""Threads of torch's operations on the CPU, in a worker with a GPU.

Loads use the cores, steps one thread: OpenMP's threads spin after each parallel operation and take
the cores from the rest of the step, the daemon and the frontends. vLLM's own server does the same.
torch keeps the number for each thread of the process. Dynamo's guards contain the number, so a load
goes on with the number of steps before vLLM compiles.
"""

from __future__ import annotations

import os

import torch

_load_threads: int | None = None


def manage(num_threads: int) -> None:
    """Let loads use ``num_threads`` and steps one, instead of ``OMP_NUM_THREADS`` both."""
    global _load_threads
    _load_threads = num_threads
    os.environ["OMP_NUM_THREADS"] = "1"  # vLLM warns of more, and leaves the number alone


def set_for_steps() -> None:
    """Set the number of the calling thread, which makes steps."""
    if _load_threads is not None:
        torch.set_num_threads(1)


def set_for_load() -> None:
    """Set the number of the calling thread, which loads a model."""
    if _load_threads is not None:
        torch.set_num_threads(_load_threads)
