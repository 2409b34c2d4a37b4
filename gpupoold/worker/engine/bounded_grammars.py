"""Grammars whose native calls are bounded in CPU time, on a thread beside the steps.

The cost of a native call of a grammar library depends on the grammar and on the tokens so far: of
an ambiguous grammar one call can take minutes. So the calls of a step run on another thread, which
releases the interpreter's lock in native code (xgrammar always, guidance for masks). The step
waits for the thread at most until one call exceeds its bound of CPU time, and then continues
without the request; the thread ends after its call.

Many costly grammars together take little more than one. Requests whose grammars took long in their
last step take turns (:func:`put_off`). What calls take beyond what is expected makes the bound for
the rest of the step smaller. The first mask is made when the grammar has been compiled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from gpupoold.system.process import LONG_GRAMMAR_NICENESS

MAX_CALL_S = 0.05
"""Limit of CPU time of one call for a grammar: a mask, or a token."""
_NEXT_SHARE = 0.25
"""Share of the bound that is left after calls of MAX_CALL_S in a step; at least PER_TOKEN_S is."""
_LEEWAY = 2.0
"""A call may take as many times what all calls of its grammar took in the grammar's last step."""
MAX_TOTAL_S = 0.2
PER_TOKEN_S = 0.002
"""A request's grammar may take ``MAX_TOTAL_S``, and ``PER_TOKEN_S`` for each token, of CPU time.

Calls for ordinary schemas take 0.01 to 0.2 ms.
"""
MAX_ABANDONED = 8
"""Limit of threads that end by themselves; while as many run, no further grammar is accepted."""
MAX_ABANDONED_OF_KEY = 2
"""Limit of the threads of one API key's grammars, beyond which no further one of it is accepted."""
_FREE_S = 0.005
"""The first calls of a step leave the bound for others' as it is."""
_MIN_WAIT_S = 0.001
_MAX_WAIT_S = 0.002
_SHORT_S = 0.0002

_T = TypeVar("_T")
_beside_steps = threading.local()  # ``thread`` is the present thread if it is a _CallThread


class GrammarOverBound(Exception):
    """The calls of a request's grammar take more CPU time than they may."""


class _Abandoned(BaseException):
    """The step continues without this thread."""


class BoundedGrammar(StructuredOutputGrammar):
    """A request's grammar, which takes tokens later and no calls after it has exceeded a bound.

    Tokens accepted outside of :meth:`GrammarCalls.run` are only noted, and taken before the next
    call. After ``refusal`` has been set every token is rejected, and no mask constrains.
    ``owner`` names whose grammar it is, see :class:`EngineGrammars`; ``key`` is the id of the API
    key, if any. ``last_turn`` is of :func:`put_off`.
    """

    def __init__(self, grammar: StructuredOutputGrammar, owner: bytes = b"", key: str = "") -> None:
        self.inner = grammar
        self.owner = owner
        self.key = key
        self.refusal = ""
        self.is_slow_call = False  # the refusal is due to one call
        self.is_final = True  # the refusal holds for the grammar at any time
        self.has_taken_up = False  # see EngineGrammars.take_up
        self.last_turn = 0
        self.expected_s = 0.0  # CPU time of the calls of the next step
        self.since_s = 0.0  # CPU time of the calls since begin_step()
        self._row: torch.Tensor | None = None  # the present mask, if it took long
        self._noted: list[int] = []
        self._num_tokens = 0
        self._used_s = 0.0

    def begin_step(self) -> float:
        """Return ``expected_s``: as long as the calls since the last step, if there were any."""
        if self.since_s:
            self.expected_s, self.since_s = self.since_s, 0.0
        return self.expected_s

    def left_s(self, limit_s: float = MAX_CALL_S) -> float:
        """Return the seconds of CPU time that the next call may take, ``limit_s`` at most."""
        total_s = MAX_TOTAL_S + PER_TOKEN_S * self._num_tokens
        return min(limit_s, total_s - self._used_s)

    def refuse(self, used_s: float, limit_s: float = MAX_CALL_S) -> None:
        """Refuse the grammar for a call that has taken ``used_s``, or for the sum of all calls."""
        total_s = self._used_s + used_s
        self.is_slow_call = used_s > MAX_CALL_S
        self.is_final = self.is_slow_call or used_s <= limit_s
        if self.is_slow_call:
            self.refusal = (
                f"The grammar takes more than {MAX_CALL_S * 1000:.0f} ms of CPU time for one "
                f"token, after {self._num_tokens} tokens; this is the bound."
            )
        elif not self.is_final:
            self.refusal = (
                f"The grammar takes more than {limit_s * 1000:.0f} ms of CPU time for one token, "
                "in a step in which other grammars took as long; repeat the request."
            )
        else:
            self.refusal = (
                f"The grammar has taken {total_s:.2f} s of CPU time for {self._num_tokens} "
                f"tokens; the bound is {MAX_TOTAL_S:g} s and {PER_TOKEN_S * 1000:g} ms per token."
            )
        if self.is_final:
            self.refusal += " Write it without ambiguity: each text should match in one way only."

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self.refusal:
            return False
        self._noted += tokens
        return self._take_noted() if hasattr(_beside_steps, "thread") else True

    def take_all(self) -> None:
        """Take the noted tokens on the calling thread, which no step waits for.

        Raises:
            GrammarOverBound: the grammar is over a bound, or rejects a token.
        """
        self._take_noted()
        if self.refusal:
            raise GrammarOverBound(self.refusal)

    def prepare(self, row: torch.Tensor) -> None:
        """Make the first mask in ``row``, of shape (1, words), and keep it for the first step."""
        if not self.is_terminated():
            self.fill_bitmask(row, 0)
            self._row = row[0]

    def _take_noted(self) -> bool:
        """Take tokens one by one; return False if the grammar is refused."""
        noted, self._noted = self._noted, []
        for token in noted:
            if self.refusal:
                break
            self._num_tokens += 1
            self._row = None
            if not self._call(self.inner.accept_tokens, "", [token]) and not self.refusal:
                self.refusal = f"The grammar's matcher has stopped at a token: {self._error()}"
        return not self.refusal

    def _error(self) -> str:
        """Return the first line of guidance's error."""
        matcher = getattr(self.inner, "ll_matcher", None)
        error: str = "" if matcher is None else matcher.get_error()
        return (error or "the token is not permitted").partition("\n")[0]

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        if not self._take_noted():
            return []
        found: list[int] = self._call(self.inner.validate_tokens, tokens)
        return found

    def rollback(self, num_tokens: int) -> None:
        if not self.refusal:
            self._num_tokens -= num_tokens
            self._row = None
            self.inner.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        if not self._take_noted():
            bitmask[batch_index].fill_(-1)
        elif self._row is not None:
            bitmask[batch_index].copy_(self._row)
        else:
            before_s = self._used_s
            self._call(self.inner.fill_bitmask, bitmask, batch_index)
            if self._used_s - before_s > _SHORT_S:  # the work of a step may begin anew
                self._row = bitmask[batch_index].clone()

    def is_terminated(self) -> bool:
        return not self._take_noted() or self.inner.is_terminated()

    def reset(self) -> None:
        self._noted, self._num_tokens, self._row = [], 0, None
        self.inner.reset()

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        thread: _CallThread | None = getattr(_beside_steps, "thread", None)
        began_s, wall_s = time.thread_time(), time.monotonic()
        if thread is not None:
            thread.begin(self, began_s)
        result = call(*arguments)
        if thread is not None:
            thread.end()
        used_s = time.monotonic() - wall_s
        if used_s > _SHORT_S:  # perhaps for lack of a core
            used_s = time.thread_time() - began_s
        if thread is not None:
            thread.used_s += used_s
        if used_s > self.left_s():
            self.refuse(used_s)
        self._used_s += used_s
        self.since_s += used_s
        return result


def put_off(grammars: Mapping[str, BoundedGrammar], turn: int) -> set[str]:
    """Return who of the owners of ``grammars`` sits out a step, so that the calls are not long.

    Grammars that took long take turns, those first whose last one is the longest ago. ``turn`` is a
    number larger than before.
    """
    found = {name: grammar.begin_step() for name, grammar in grammars.items()}
    waiting = [name for name, expected_s in found.items() if expected_s > _SHORT_S]
    left_s, out = MAX_CALL_S, set[str]()
    for name in sorted(waiting, key=lambda name: grammars[name].last_turn):
        if found[name] > left_s and left_s < MAX_CALL_S:
            out.add(name)
        else:
            left_s -= found[name]
            grammars[name].last_turn = turn
    return out


class GrammarCalls:
    """Runs a step's calls of grammars beside the step; for one thread at a time."""

    def __init__(self) -> None:
        self._thread: _CallThread | None = None
        self._abandoned: list[_CallThread] = []

    def abandoned_keys(self) -> list[str]:
        """Return the API keys of the grammars whose abandoned calls have not ended yet."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        return [thread.abandoned_key for thread in self._abandoned]

    def run(self, work: Callable[[], _T], on_abandoned: Callable[[], None] | None = None) -> _T:
        """Return the result of ``work``, whose grammars are :class:`BoundedGrammar`.

        If a call exceeds its bound, the grammar is refused, ``on_abandoned`` is called, and
        ``work`` begins anew. So work may be repeated after any of its calls, and must not write
        to memory of an earlier try.
        """
        used_s = 0.0
        while True:
            if self._thread is None:
                self._thread = _CallThread()
                self._thread.start()
            thread = self._thread
            thread.used_s = used_s
            thread.jobs.put(work)
            outcome = _outcome(thread)
            if outcome is not None:
                result, error = outcome
                if error is not None:
                    raise error
                return result  # type: ignore[no-any-return]
            self._thread = None
            self._abandoned.append(thread)
            used_s = thread.used_s
            if on_abandoned is not None:
                on_abandoned()


def _outcome(thread: _CallThread) -> tuple[Any, BaseException | None] | None:
    """Wait for a job; return its result and error, or None after a call over its bound."""
    wait_s: float | None = _MAX_WAIT_S
    while wait_s is not None:
        try:
            return thread.outcomes.get(timeout=wait_s)
        except queue.Empty:
            wait_s = thread.left_s()
    return None


class _CallThread(threading.Thread):
    """A thread for jobs, which ends after a call over the bound.

    ``_present`` has the present call, if any. Whoever takes the call out, this thread after the
    call or :meth:`left_s` before, decides whether the step waits for this thread. ``used_s`` is the
    CPU time of the step's calls so far. ``abandoned_key`` is the API key of the grammar with which
    the thread was left.
    """

    def __init__(self) -> None:
        super().__init__(name="grammar-calls", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.used_s = 0.0
        self.abandoned_key = ""
        self._clock = 0  # of this thread's CPU time
        self._present: list[tuple[BoundedGrammar, float]] = []

    def run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        _beside_steps.thread = self
        while True:
            try:
                outcome = _outcome_of(self.jobs.get())
            except _Abandoned:
                return
            self.outcomes.put(outcome)
            del outcome

    def begin(self, grammar: BoundedGrammar, began_s: float) -> None:
        """Note the start of a call; ``began_s`` is this thread's CPU time."""
        self._present.append((grammar, began_s))

    def end(self) -> None:
        """Note the end of a call.

        Raises:
            _Abandoned: the step has gone on without this thread.
        """
        try:
            self._present.pop()
        except IndexError:
            raise _Abandoned from None

    def left_s(self) -> float | None:
        """Return the seconds until the present call may exceed its bound at the earliest.

        None: the call has exceeded its bound. The grammar is refused, and the thread abandoned at
        the lowest priority.
        """
        present = self._present[-1:]
        if not present:
            return _MIN_WAIT_S
        grammar, began_s = present[0]
        used_s = time.clock_gettime(self._clock) - began_s
        limit_s = self._limit_s(grammar)
        left_s = grammar.left_s(limit_s) - used_s
        if left_s >= 0:
            return min(_MAX_WAIT_S, max(_MIN_WAIT_S, left_s))
        try:
            taken = self._present.pop()
        except IndexError:
            return _MIN_WAIT_S
        if taken is present[0]:  # else another call has just begun, and is only repeated
            grammar.refuse(used_s, limit_s)
            self.used_s += used_s
        self.abandoned_key = taken[0].key
        with contextlib.suppress(OSError):  # a container may forbid the call
            os.setpriority(os.PRIO_PROCESS, self.native_id or 0, LONG_GRAMMAR_NICENESS)
        return None

    def _limit_s(self, grammar: BoundedGrammar) -> float:
        of_others_s = max(0.0, self.used_s - grammar.since_s - _FREE_S)
        limit_s = MAX_CALL_S * _NEXT_SHARE ** (of_others_s / MAX_CALL_S)
        return min(MAX_CALL_S, max(limit_s, PER_TOKEN_S, _LEEWAY * grammar.expected_s))


def _outcome_of(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
