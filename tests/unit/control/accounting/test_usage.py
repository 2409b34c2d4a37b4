"""Use of the GPUs: seconds divided among requests, energy by seconds, rows of hours and minutes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given, strategies as st

from gpupool_state import DATABASE_NAME, Database, History
from gpupoold.control.accounting.meters import DeviceSample, UsageMeter, UseKey, _shares
from gpupoold.control.live_requests import LiveRequest
from tests.unit.control.live import live_request

AT = 1_700_002_800.0  # an hour begins


class Clock:
    def __init__(self) -> None:
        self.at = AT

    def __call__(self) -> float:
        return self.at


def sample(
    number: int = 0,
    energy_j: float | None = None,
    switching_s: float = 0.0,
    kv_host: tuple[int, int] = (0, 0),
    num_gpus: int = 1,
) -> DeviceSample:
    return DeviceSample(number, num_gpus, switching_s, energy_j, *kv_host)


def decoding(request_id: str, key_id: str = "", model: str = "m") -> LiveRequest:
    request = live_request(request_id, model, key_id=key_id)
    request.add_tokens([1], 0.5)
    return request


@pytest_asyncio.fixture
async def history(tmp_path: Path) -> AsyncIterator[History]:
    async with await Database.open(tmp_path / DATABASE_NAME) as db:
        history = History(db, flush_interval_s=60)
        await history.start()
        yield history
        await history.stop()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 9000)), min_size=1, max_size=20),
    st.floats(0, 10),
    st.floats(0, 1),
)
def test_shares_add_up(requests: list[tuple[bool, int]], elapsed_s: float, decode_s: float) -> None:
    lives = []
    for index, (is_first, num_prompt_tokens) in enumerate(requests):
        live = live_request(str(index), num_prompt_tokens=num_prompt_tokens)
        if not is_first:
            live.add_tokens([1], 0.5)
        lives.append(live)
    shares = [share_s for _, share_s in _shares(lives, elapsed_s, decode_s)]
    assert all(share_s >= 0 for share_s in shares)
    assert sum(shares) == pytest.approx(elapsed_s)


def test_prompts_have_the_time_beyond_a_decode_step() -> None:
    first, other = (
        live_request("a", num_prompt_tokens=300),
        live_request("b", num_prompt_tokens=100),
    )
    shares = dict(zip("abc", _shares([first, other, decoding("c")], 0.9, 0.1), strict=True))
    seconds = {name: share_s for name, (_, share_s) in shares.items()}
    decode_s = 0.1 / 3
    assert seconds == pytest.approx({"a": 0.6 + decode_s, "b": 0.2 + decode_s, "c": decode_s})


@pytest.mark.asyncio
async def test_time_without_work_belongs_to_nobody(history: History) -> None:
    meter = UsageMeter(history, Clock())
    request = live_request("r", arrival_s=100.0)
    meter.stepped(0, [request], -1e9, 101.0, 0.1)  # idle before the arrival
    request.add_tokens([1], 101.0)
    meter.stepped(0, [request], -1e9, 101.5, 0.1)
    meter.stepped(0, [request], 103.0, 103.25, 0.1)  # another model had a turn
    meter.stepped(0, [], 103.0, 104.0, 0.1)
    assert meter.so_far()[UseKey("m", "")].gpu_s == pytest.approx(1.0 + 0.5 + 0.25)


@pytest.mark.asyncio
async def test_a_groups_seconds_count_for_each_gpu(history: History) -> None:
    meter = UsageMeter(history, Clock())
    meter.sample([sample(num_gpus=4)])
    meter.stepped(0, [live_request()], 1.0, 3.0, 0.1)
    assert meter.so_far()[UseKey("m", "")].gpu_s == pytest.approx(8.0)


@pytest.mark.asyncio
async def test_energy_is_divided_by_seconds(history: History) -> None:
    clock = Clock()
    meter = UsageMeter(history, clock)
    meter.sample([sample(energy_j=1e6)])
    for key_id, steps_s in (("k1", 30.0), ("k2", 15.0)):
        meter.stepped(0, [decoding("r", key_id)], clock.at - AT + 1, clock.at - AT + 1 + steps_s, 9)
        clock.at += steps_s
    clock.at = AT + 59.9
    meter.sample([sample(energy_j=1e6 + 6000.0, switching_s=5.0, kv_host=(300, 400))])
    clock.at = AT + 60
    meter.sample([sample(energy_j=1e6 + 6000.0, switching_s=5.0, kv_host=(300, 400))])
    found = meter.so_far()
    energies_j = [found[UseKey("m", key)].energy_j for key in ("k1", "k2")]
    assert energies_j == pytest.approx([3000.0, 1500.0])
    await history.flush()
    [device] = await history.device_sums(AT)
    assert (device.seconds, device.computing_s) == pytest.approx((60.0, 45.0))
    assert (device.switching_s, device.energy_j) == (5.0, 6000.0)
    assert (device.kv_host_bytes, device.kv_host_slab_bytes) == (200, 266)  # of three samples


@pytest.mark.asyncio
async def test_an_hour_has_one_row_for_each_model_and_key(history: History) -> None:
    clock = Clock()
    meter = UsageMeter(history, clock)
    for minute in range(1, 121):
        meter.ended(decoding("r", "k"))
        clock.at = AT + 60 * minute
        meter.sample([sample()])
    await history.flush()
    rows = await history._db.fetch_all("SELECT * FROM usage_hours")
    assert [(row["hour_at"] - AT, row["num_requests"]) for row in rows] == [(0, 60), (3600, 60)]
    [use] = await history.usage(AT + 3600)  # the first hour ended before
    assert (use.num_requests, use.num_output_tokens, use.hour_at) == (60, 60, AT + 3600)
    [use] = await history.usage(AT)
    assert (use.api_key, use.num_requests) == ("k", 120)
    assert meter.so_far()[UseKey("m", "k")].num_requests == 120


@pytest.mark.asyncio
async def test_idle_devices_have_no_rows(history: History) -> None:
    clock = Clock()
    meter = UsageMeter(history, clock)
    for _ in range(3):
        meter.sample([sample(0), sample(1)])
        clock.at += 60
    await history.flush()
    assert await history.device_sums(0) == []
    assert await history.usage(0) == []


@pytest.mark.asyncio
async def test_counts_of_a_moment_are_not_stored(history: History) -> None:
    clock = Clock()
    meter = UsageMeter(history, clock)
    meter.ended(decoding("r"))
    clock.at += 1
    meter.close(least_s=2.0)
    await history.flush()
    assert await history.usage(0) == []
    clock.at += 1
    meter.close(least_s=2.0)
    await history.flush()
    assert len(await history.usage(0)) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
async def test_a_clock_set_by_a_day_delays_and_stretches_no_row(
    history: History, step_s: float
) -> None:
    clock = Clock()
    meter = UsageMeter(history, clock)
    for second in range(3):
        clock.at = AT + second
        meter.sample([sample(energy_j=0.0)])
    meter.ended(decoding("r"))
    clock.at += step_s
    meter.sample([sample(energy_j=5.0)])
    await history.flush()
    [use] = await history.usage(0)
    assert (use.hour_at, use.num_requests) == (AT, 1)
    [device] = await history.device_sums(0)
    assert device.seconds == 4.0  # one for each sample
    meter.ended(decoding("s"))
    clock.at += 60
    meter.sample([sample()])
    await history.flush()
    assert sum(use.num_requests for use in await history.usage(0)) == 2
