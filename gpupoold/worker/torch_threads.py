"""Threads of torch's operations on the CPU, in a worker with a GPU.

Loads use the cores, steps one thread: OpenMP's threads spin after each parallel operation and take
the cores from the rest of the step, the daemon and the frontends. torch keeps the number for each
thread of the process. Dynamo's guards contain the number too, so vLLM sets the number of steps on
the thread of a load before it compiles.
"""

from __future__ import annotations

import os

import torch
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, set_torch_threads_for_runtime


def may_change() -> None:
    """Let steps use one thread: ``OMP_NUM_THREADS`` is not the user's setting."""
    os.environ[OMP_NUM_THREADS_SET_BY_VLLM] = "1"


def set_for_steps() -> None:
    """Set the number of the calling thread, which makes steps."""
    set_torch_threads_for_runtime()


def set_for_load() -> None:
    """Set the number of the calling thread, which loads a model."""
    if os.environ.get(OMP_NUM_THREADS_SET_BY_VLLM) == "1":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
