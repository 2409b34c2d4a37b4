"""CUDA graphs of an engine: of few sizes of batches at the load, of the others in idle moments.

vLLM captures all sizes of its configuration in one call, and runs a batch with the graph of the
next size. Here vLLM's manager knows the captured sizes only, so a batch of decode steps between two
of these is padded to the larger one until its own size is captured. A batch with prompts is padded
to its own size at any time, and runs without a graph before: with another padding, kernels may add
its sums up in another order, and a request alone would not always have the same answer.

A capture runs the model on dummy requests, whose block tables are zeros (the null block, which is
on the device with the weights) and whose slots are -1 (nothing is written): vLLM does the same
beside live requests on a data-parallel rank without work (``execute_dummy_batch``). The buffers of
a step's inputs are overwritten, and written anew by the next step. So no step may be under way, and
no KV is touched.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from gpupoold.durations import GraphSizes
from gpupoold.worker.weights.stages import replaced

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

SELF_CHECK_TOKENS = 16
"""Prompt tokens of the self-check, whose sums must not be added up in another order later."""

_GROWTH = 4  # a batch is padded to less than so many times its size
_LEAST_BYTES = 1 << 20  # of a size: the driver's

_logger = logging.getLogger(__name__)


def first_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes to capture at a load, of ``sizes`` in ascending order.

    One sequence and the self-check need no other size later; the largest size has the buffers of
    all.
    """
    first = [sizes[0]]
    for size in sizes:
        if size >= _GROWTH * first[-1] or size == sizes[-1]:
            first.append(size)
    first += [size for size in sizes if size >= SELF_CHECK_TOKENS][:1]
    return sorted(set(first))


class LateGraphs:
    """Captures the graphs of one manager, size by size.

    ``capture`` makes the manager capture what is in its ``_capture_descs``.
    """

    def __init__(self, manager: CudaGraphManager, capture: Callable[[], None]) -> None:
        self._manager, self._capture = manager, capture
        self._workspace = workspace._manager
        self._captured: list[int] = []
        self._left: list[int] = []
        self._known: set[Any] = set()
        self._all_candidates = manager._candidates
        self._dispatch = manager.dispatch
        self.sizes = GraphSizes()
        self.reserved_bytes = 0
        """Device memory for the sizes that are captured after the load, from the load on."""

    def capture_first(self) -> None:
        """Capture few sizes, the largest first."""
        sizes = sorted(self._manager.compilation_config.cudagraph_capture_sizes or ())
        first, taken = first_sizes(sizes), list[int]()
        for size in reversed(first):
            free_bytes = _free_bytes()
            self._add(size)
            taken.append(free_bytes - _free_bytes())
        self._left = [size for size in sizes if size not in first]
        self.sizes = GraphSizes(len(first), num_left=len(self._left))
        if self._left:
            self._manager.dispatch = self._dispatch_padded  # type: ignore[method-assign]
        # The largest size also has the activations, which the others share.
        each = statistics.median_high(taken[1:] or taken)
        self.reserved_bytes = max(_LEAST_BYTES, each) * len(self._left)

    def capture_next(self) -> None:
        """Capture a further size, while the device has no other work.

        After an error, the engine goes on with the captured sizes.
        """
        workspace._manager = self._workspace
        began_s, size = time.monotonic(), self._left.pop(0)
        gc.disable()  # a collection may end the capture
        try:
            self._add(size)
            done = 1
            if not self._left:
                self._manager.dispatch = self._dispatch  # type: ignore[method-assign]
        except Exception:
            _logger.exception("no graphs for %d tokens, nor for further sizes", size)
            self._left.clear()
            done = 0
        finally:
            gc.enable()
        _free_bytes()
        self.sizes = replace(
            self.sizes,
            num_late=self.sizes.num_late + done,
            num_left=len(self._left),
            late_s=self.sizes.late_s + time.monotonic() - began_s,
        )

    def _dispatch_padded(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, **options: Any
    ) -> BatchExecutionDescriptor:
        """Return how to run a batch, as vLLM's manager does; see the module's docstring."""
        batch = num_reqs, num_tokens, uniform_token_count
        found = self._dispatch(*batch, **options)
        if uniform_token_count == self._manager.decode_query_len:
            return found
        with replaced(self._manager, "_candidates", self._all_candidates):
            wanted = self._dispatch(*batch, **options)
        if wanted.num_tokens == found.num_tokens:
            return found
        return BatchExecutionDescriptor(
            CUDAGraphMode.NONE,
            wanted.num_tokens,
            num_reqs,
            num_active_loras=found.num_active_loras,
        )

    def _add(self, size: int) -> None:
        """Capture a size; the manager knows it afterwards, unless there was an error."""
        manager = self._manager
        self._set_sizes([*self._captured, size])
        complete = manager._capture_descs
        manager._capture_descs = {
            mode: [descriptor for descriptor in descriptors if descriptor not in self._known]
            for mode, descriptors in complete.items()
        }
        try:
            self._capture()
        except BaseException:
            self._set_sizes(self._captured)
            raise
        manager._capture_descs = complete
        self._captured.append(size)
        self._known.update(*complete.values())

    def _set_sizes(self, sizes: list[int]) -> None:
        manager = self._manager
        manager._candidates, manager._capture_descs = {}, {}
        with replaced(manager.compilation_config, "cudagraph_capture_sizes", sizes):
            manager._init_candidates()


def _free_bytes() -> int:
    """Return the free memory of the device, after all kernels and without torch's cache.

    vLLM captures on separate streams, for which the device does not wait before it unmaps pages.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
