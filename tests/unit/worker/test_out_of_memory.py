"""Errors that mean: no memory."""

from __future__ import annotations

import errno

import pytest

from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.pages import OutOfPages
from gpupoold.system.process import OUT_OF_DEVICE_MEMORY_STATUS, OUT_OF_MEMORY_STATUS
from gpupoold.worker.__main__ import memory_status

HOST, DEVICE = OUT_OF_MEMORY_STATUS, OUT_OF_DEVICE_MEMORY_STATUS


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), HOST),
        (OutOfPages("3 of 4"), HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), HOST),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `c()`"), DEVICE),
        (CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"), DEVICE),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), HOST),
    ],
)
def test_they_say_so(error: Exception, status: int) -> None:
    assert memory_status(error) == status


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        ValueError("out of memory"),
        OSError(errno.ENOENT, "out of memory"),
        KeyError("model"),
    ],
)
def test_others_do_not(error: Exception) -> None:
    assert memory_status(error) is None


def test_what_it_came_from_counts() -> None:
    failed = RuntimeError("the step failed")
    failed.__cause__ = MemoryError()
    assert memory_status(failed) == HOST
    looped = ValueError("a")
    looped.__context__ = other = ValueError("b")
    other.__context__ = looped
    assert memory_status(looped) is None


def test_torch_says_it_so() -> None:
    """The words of the installed version."""
    torch = pytest.importorskip("torch", reason="the engine is not installed")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    assert memory_status(caught.value) == HOST
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
