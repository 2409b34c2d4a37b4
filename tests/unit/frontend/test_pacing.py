"""Steady streams: when the tokens of a burst are handed on."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.gates import Pacer, wanted_gap_s, wanted_pace

GAP_S = 0.1


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int] = field(default_factory=lambda: [1])
    finish_reason: Any = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            self.now_s += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


class Stream:
    """A paced stream; ``times_s`` has the time of each token, from the first on."""

    def __init__(self, gap_s: float = math.inf, max_gap_s: float = GAP_S) -> None:
        self.loop = asyncio.get_running_loop()
        self.times_s: list[float] = []
        self.pacer = Pacer(self._released, max_gap_s)
        with wanted_pace.holding(gap_s):
            self.pacer.begin("r")

    def made(self, num_tokens: int = 1, finish_reason: Any = None) -> None:
        self._released(self.pacer.hold([Output("r", [1] * num_tokens, finish_reason)]))

    def _released(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.times_s += [self.loop.time()] * len(output.new_token_ids)

    def gaps_s(self) -> list[float]:
        return [later - sooner for sooner, later in itertools.pairwise(self.times_s)]


def run(test: Callable[[], Any]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(test())
    finally:
        loop.close()


def test_a_burst_is_spread_evenly() -> None:
    async def spread() -> None:
        stream = Stream()
        for number in range(10):
            stream.made(finish_reason="stop" if number == 9 else None)
        assert len(stream.times_s) == 1, "the first token waits for nothing"
        await asyncio.sleep(5.0)
        assert stream.gaps_s() == pytest.approx([GAP_S] * 9)
        assert not stream.pacer.is_active

    run(spread)


def test_pauses_between_bursts_are_not_seen() -> None:
    async def turns() -> None:
        stream = Stream()
        for _ in range(4):  # ten tokens in 0.2 s, then 0.8 s for other models
            for _ in range(10):
                stream.made()
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.8)
        await asyncio.sleep(2.0)
        assert len(stream.times_s) == 40
        assert max(stream.gaps_s()) == pytest.approx(GAP_S)

    run(turns)


def test_a_token_that_comes_late_is_not_held() -> None:
    async def late() -> None:
        stream = Stream()
        stream.made()
        await asyncio.sleep(1.0)
        stream.made()
        stream.made()
        await asyncio.sleep(1.0)
        assert stream.gaps_s() == pytest.approx([1.0, GAP_S])

    run(late)


def test_several_tokens_of_a_step_count_as_many() -> None:
    async def drafts() -> None:
        stream = Stream()
        stream.made(3)
        stream.made(1)
        await asyncio.sleep(1.0)
        assert stream.times_s[3] - stream.times_s[0] == pytest.approx(3 * GAP_S)

    run(drafts)


@pytest.mark.parametrize(("gap_s", "expected_s"), [(0.03, 0.03), (5.0, GAP_S)])
def test_the_gap_is_the_clients_but_no_more_than_the_target(
    gap_s: float, expected_s: float
) -> None:
    async def own_gap() -> None:
        stream = Stream(gap_s)
        for _ in range(5):
            stream.made()
        await asyncio.sleep(3.0)
        assert stream.gaps_s() == pytest.approx([expected_s] * 4)

    run(own_gap)


def test_nothing_comes_after_the_end() -> None:
    async def ended() -> None:
        stream = Stream()
        stream.made()
        stream.made()
        stream.pacer.end(["r", "unknown"])
        await asyncio.sleep(1.0)
        assert len(stream.times_s) == 1
        assert not stream.pacer.is_active

    run(ended)


def test_other_requests_are_not_held() -> None:
    async def both() -> None:
        stream = Stream()
        stream.made()
        held, other = Output("r"), Output("other")
        assert stream.pacer.hold([held, other]) == [other]
        stream.pacer.begin("no pace here")
        assert stream.pacer.hold([Output("no pace here")] * 2) != []

    run(both)


def test_released_gaps_are_counted() -> None:
    async def run_one() -> None:
        stream = Stream()
        stream.made(1)
        stream.made(4)
        await asyncio.sleep(1.0)
        gaps = stream.pacer.take_gaps()
        assert len(gaps) == 4
        assert gaps.sum_s == pytest.approx(stream.times_s[-1] - stream.times_s[0])
        assert len(stream.pacer.take_gaps()) == 0

    run(run_one)


@pytest.mark.parametrize(
    ("value", "gap_s"),
    [(b"steady", math.inf), (b" Steady ", math.inf), (b"off", None), (b"50ms", 0.05)],
)
def test_header(value: bytes, gap_s: float | None) -> None:
    assert wanted_gap_s({"headers": [(b"x-gpupool-pace", value)]}) == gap_s
    assert wanted_gap_s({"headers": [(b"x-gpupool-pace", value)]}, "90ms", "70ms") == gap_s
    assert wanted_gap_s({"headers": []}) is None


@pytest.mark.parametrize(
    ("of_key", "of_model", "gap_s"),
    [
        ("", "", None),
        ("", "steady", math.inf),
        ("20ms", "steady", 0.02),
        ("off", "steady", None),
        ("steady", "off", math.inf),
    ],
)
def test_paces_of_key_and_model(of_key: str, of_model: str, gap_s: float | None) -> None:
    assert wanted_gap_s({"headers": []}, of_key, of_model) == gap_s


@pytest.mark.parametrize(
    "value", [b"fast", b"0", b"50", b"-1s", b"nan", b"inf", b"0.1ms", b"9" * 4000]
)
def test_wrong_header(value: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        wanted_gap_s({"headers": [(b"x-gpupool-pace", value)]})
    assert refused.value.status == 400
    assert len(refused.value.message) < 300
