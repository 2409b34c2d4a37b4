"""Garbage collection of the worker's heap, which stops all threads of the process.

A collection of vLLM's and torch's objects takes 0.3 s and more. Frozen objects are not collected:
the heap is frozen before a load, so that collections during the load are short, and after the load.
The objects of a closed engine, most of which are frozen, wait until the device is idle.
"""

from __future__ import annotations

import gc
import math

import torch

# Time without work before a collection.
_IDLE_S = 1.0


class Heap:
    """The heap of this process."""

    def __init__(self) -> None:
        self._has_garbage = False
        self._busy_s = -math.inf

    def freeze(self) -> None:
        """Exclude all present objects from collections until the next ``collect``."""
        gc.freeze()

    def engine_closed(self) -> None:
        """Record that frozen objects are garbage."""
        self._has_garbage = True

    def collect_if_idle(self, now_s: float, *, is_idle: bool) -> None:
        """Collect all garbage after some time without work; to be called regularly."""
        if not is_idle:
            self._busy_s = now_s
        elif now_s - self._busy_s > _IDLE_S:
            self.collect()

    def collect(self) -> None:
        """Collect all garbage, if an engine was closed; stops the process for a time."""
        if not self._has_garbage:
            return
        self._has_garbage = False
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()  # no-op without a GPU


HEAP = Heap()
