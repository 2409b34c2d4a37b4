"""Recognition of out-of-memory errors."""

from __future__ import annotations

import errno

from gpupoold.memory.contracts import OutOfPages

# The errors of CUDA and of torch's CPU allocator are RuntimeErrors.
_SAID_BY_TORCH = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or any cause, is a lack of host memory, device memory or pages."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if _says_so(one):
            return True
        one = one.__cause__ or one.__context__
    return False


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError | OutOfPages):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(said in text for said in _SAID_BY_TORCH)
