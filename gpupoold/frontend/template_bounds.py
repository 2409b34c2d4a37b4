"""A limit of CPU time for each use of a chat template.

A template is a program of the checkpoint's author, and its time depends on the client's text. vLLM
renders in a thread, which no caller can end: after its own limit vLLM leaves the thread running.

The limit acts between two instructions of the interpreter. Powers of integers, one instruction of
any length, are bounded in size; docs/security.md names what is not bounded.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import filters
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf

from gpupoold.frontend.body import let_others_run

MAX_RENDER_S = 2.0
"""Limit of CPU time for one conversation, in seconds; ordinary templates take milliseconds."""
_LOOK_S = 0.05
_MAX_BITS = 4096
"""Limit of the integers that a template's products and powers give."""
_MAX_DECIMALS = 1000
_MESSAGE_BYTES = 40  # about the least that a message takes in a body


class _TooSlow(BaseException):
    """Raised inside a rendering thread; no handler of a template catches it."""


@dataclass(eq=False, slots=True)
class _Rendering:
    thread_id: int = field(default_factory=threading.get_ident)
    clock: int = 0
    ends_s: float = 0.0
    is_stopped: bool = False


class RenderLimit:
    """Ends functions that take too much CPU time in their thread; one watching thread for all."""

    def __init__(self, max_cpu_s: float) -> None:
        self._max_cpu_s = max_cpu_s
        self._lock = threading.Lock()
        self._jobs: set[_Rendering] = set()
        self._has_jobs = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, render: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the function's result.

        Raises:
            VLLMValidationError: the function took longer than the limit.
        """
        job = self._begin()
        try:
            try:
                return render(*args, **kwargs)
            finally:
                self._end(job)
        except _TooSlow:
            self._end(job)  # the exception may have come before the end of the first call
            raise VLLMValidationError(
                f"The chat template of this model takes more than {self._max_cpu_s:g} s of CPU "
                "time for this conversation. Send a shorter conversation."
            ) from None

    def _begin(self) -> _Rendering:
        job = _Rendering()
        job.clock = time.pthread_getcpuclockid(job.thread_id)
        job.ends_s = time.clock_gettime(job.clock) + self._max_cpu_s
        with self._lock:
            self._jobs.add(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="render-limit", daemon=True
                )
                self._thread.start()
        self._has_jobs.set()
        return job

    def _end(self, job: _Rendering) -> None:
        with self._lock:
            self._jobs.discard(job)
            if job.is_stopped:
                _raise_in(job.thread_id, None)

    def _watch(self) -> None:
        while True:
            self._has_jobs.wait()
            time.sleep(_LOOK_S)
            with self._lock:
                for job in self._jobs:
                    # The thread exists: it removes the job.
                    if not job.is_stopped and time.clock_gettime(job.clock) > job.ends_s:
                        job.is_stopped = True
                        _raise_in(job.thread_id, _TooSlow)
                if not self._jobs:
                    self._has_jobs.clear()


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next instruction; None takes a pending one back."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)


def bound_arithmetic() -> None:
    """Bound the integers of all templates in this process."""
    sandbox: Any = ImmutableSandboxedEnvironment  # transformers makes it for each template
    sandbox.intercepted_binops = frozenset({"*", "**"})
    sandbox.call_binop = _bounded_operation
    filters.FILTERS["round"] = _round


def _bounded_operation(
    environment: ImmutableSandboxedEnvironment,
    context: Context,
    operator: str,
    left: Any,
    right: Any,
) -> Any:
    """Return the result of an operation of a template."""
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length()
        num_bits = num_bits * right if operator == "**" else num_bits + right.bit_length()
        if num_bits > _MAX_BITS:
            raise SecurityError("the chat template computes too large an integer")
    return environment.binop_table[operator](left, right)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Round as Jinja's filter, which computes a power of the precision."""
    if abs(precision) > _MAX_DECIMALS:
        raise SecurityError("the chat template rounds to too many decimals")
    return filters.do_round(value, precision, method)


@functools.cache
def bound_rendering() -> None:
    """Limit the CPU time of chat templates in this process.

    To be called before renderers are made, which keep a reference to vLLM's function.
    """
    bound_arithmetic()
    limit = RenderLimit(MAX_RENDER_S)
    # Not public: the function of all renderers with Jinja templates, on the loop and in threads.
    render = hf.safe_apply_chat_template
    hf.safe_apply_chat_template = functools.wraps(render)(functools.partial(limit.run, render))
    hf.parse_chat_messages_async = after_others(hf.parse_chat_messages_async)


def after_others(parse: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return vLLM's function for a conversation, which was validated just before.

    4,000 messages take 25 to 100 ms each time.
    """

    @functools.wraps(parse)
    async def parse_later(messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        await let_others_run(len(messages) * _MESSAGE_BYTES)
        return await parse(messages, *args, **kwargs)

    return parse_later
