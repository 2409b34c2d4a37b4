"""Errors that mean: no memory."""

from __future__ import annotations

import errno

import pytest

from gpupoold.memory.device import OutOfPages
from gpupoold.worker.__main__ import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfPages("3 of 4"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_they_say_so(error: Exception) -> None:
    assert is_out_of_memory(error)


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
    assert not is_out_of_memory(error)


def test_what_it_came_from_counts() -> None:
    failed = RuntimeError("the step failed")
    failed.__cause__ = MemoryError()
    assert is_out_of_memory(failed)
    looped = ValueError("a")
    looped.__context__ = other = ValueError("b")
    other.__context__ = looped
    assert not is_out_of_memory(looped)


def test_torch_says_it_so() -> None:
    """The words of the installed version."""
    torch = pytest.importorskip("torch", reason="the engine is not installed")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
