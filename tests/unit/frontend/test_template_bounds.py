"""Chat templates that take long on what a client wrote: they end, in whichever thread."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
from jinja2 import filters
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf

from gpupoold.frontend.rendering import (
    RenderLimit,
    after_others,
    bound_arithmetic,
    bound_rendering,
)

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOO_SLOW = r"takes more than 0\.05 s of CPU time for this conversation"


@pytest.fixture
def limit() -> RenderLimit:
    return RenderLimit(0.05)


def endless() -> str:
    return ImmutableSandboxedEnvironment().from_string(LOOPS).render()


def test_results_and_errors_pass(limit: RenderLimit) -> None:
    def fail() -> NoReturn:
        raise LookupError("as it was")

    assert limit.run(lambda one, *, two: (one, two), 1, two=2) == (1, 2)
    with pytest.raises(LookupError, match="as it was"):
        limit.run(fail)


def test_an_endless_template_ends_in_the_callers_thread(limit: RenderLimit) -> None:
    for _ in range(3):
        with pytest.raises(VLLMValidationError, match=TOO_SLOW):
            limit.run(endless)
    assert sum(range(1_000_000)) == 499999500000, "the thread goes on"


def test_an_endless_template_ends_in_a_pools_thread(limit: RenderLimit) -> None:
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(VLLMValidationError, match=TOO_SLOW):
            pool.submit(limit.run, endless).result()
        assert pool.submit(limit.run, lambda: "next").result() == "next"


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("intercepted_binops", "call_binop"):
        value = getattr(ImmutableSandboxedEnvironment, name)
        monkeypatch.setattr(ImmutableSandboxedEnvironment, name, value)
    monkeypatch.setitem(filters.FILTERS, "round", filters.FILTERS["round"])
    bound_arithmetic()


@pytest.mark.parametrize(
    "expression",
    [
        "x ** 99999999",
        "9 ** 99999999",
        "(x ** 1000) * (x ** 1000)",
        "x | round(99999999, 'floor')",
        "x | round(-99999999, 'ceil')",
    ],
)
def test_one_instruction_takes_no_long_time(expression: str, arithmetic: None) -> None:
    template = ImmutableSandboxedEnvironment().from_string("{{ " + expression + " }}")
    with pytest.raises(SecurityError, match="the chat template"):
        template.render(x=9)


def test_ordinary_arithmetic(arithmetic: None) -> None:
    text = "{{ x * 3 }} {{ x ** 2 }} {{ 'ab' * 2 }} {{ 2 ** -1 }} {{ 2.567 | round(2) }}"
    assert ImmutableSandboxedEnvironment().from_string(text).render(x=9) == "27 81 abab 0.5 2.57"


def test_no_handler_in_the_function_keeps_it_alive(limit: RenderLimit) -> None:
    def stubborn() -> str:
        try:
            return endless()
        except Exception:
            return endless()

    with pytest.raises(VLLMValidationError, match=TOO_SLOW):
        limit.run(stubborn)


def test_only_cpu_time_counts(limit: RenderLimit) -> None:
    def wait() -> str:
        time.sleep(0.3)
        return "rendered"

    assert limit.run(wait) == "rendered"


def test_others_are_not_ended(limit: RenderLimit) -> None:
    """Each of two threads has a limit of its own, and a third has none."""
    ended = threading.Event()

    def count() -> int:
        number = 0
        while not ended.is_set():
            number += 1
        return number

    with ThreadPoolExecutor(4) as pool:
        counting = pool.submit(count)
        slow = [pool.submit(limit.run, endless) for _ in range(2)]
        quick = [pool.submit(limit.run, lambda: "quick") for _ in range(100)]
        assert {one.result() for one in quick} == {"quick"}
        for one in slow:
            with pytest.raises(VLLMValidationError, match=TOO_SLOW):
                one.result()
        ended.set()
        assert counting.result()


def test_ends_at_the_limit_leave_nothing_behind(limit: RenderLimit) -> None:
    """Functions that end about when they are stopped: the exception is taken back, or seen."""

    def busy(until_s: float) -> str:
        while time.thread_time() < until_s:
            pass
        return "done"

    outcomes = set()
    for number in range(24):
        try:
            outcomes.add(limit.run(busy, time.thread_time() + 0.04 + number * 0.002))
        except VLLMValidationError:
            outcomes.add("ended")
        time.sleep(0)
    assert outcomes == {"done", "ended"}
    assert not limit._jobs


async def test_vllms_renderers_have_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def render(text: str) -> str:
        rendered.append(threading.current_thread().name)
        return text

    monkeypatch.setattr(hf, "safe_apply_chat_template", render)
    bound_rendering.cache_clear()
    bound_rendering()
    bound_rendering()
    assert await asyncio.to_thread(hf.safe_apply_chat_template, "text") == "text"
    assert len(rendered) == 1
    bound_rendering.cache_clear()


@pytest.mark.parametrize(("num_messages", "others_run"), [(10, False), (4_000, True)])
def test_others_on_the_loop_precede_a_long_conversation(
    num_messages: int, others_run: bool
) -> None:
    async def count() -> None:
        for _ in range(5):  # as a chunk, which passes through several tasks
            await asyncio.sleep(0)
        done.append("other")

    async def parse(messages: list[int]) -> int:
        done.append("parsed")
        return len(messages)

    async def run() -> int:
        other = asyncio.create_task(count())
        try:
            parsed: int = await after_others(parse)([0] * num_messages)
            return parsed
        finally:
            await other

    done: list[str] = []
    assert asyncio.run(run()) == num_messages
    assert done == (["other", "parsed"] if others_run else ["parsed", "other"])
