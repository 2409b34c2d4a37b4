"""What fails is replaced, who is at fault is stopped, and no request waits for ever."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from benchmarks.bench.in_daemon import leftovers
from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas import DeviceInfo
from gpupoold.errors import Refused
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    QWEN2,
    Answer,
    Background,
    api_client,
    are_frontends_ready,
    ask,
    check,
    child,
    device,
    emulated_config,
    eventually,
    frontend,
    private_daemon,
    ps,
    sim_daemon,
    until,
)

PROMPT = "who are you?"
BACK_S = 120.0


def config_with(device_bytes: int, **limits: str) -> str:
    lines = [f'{name} = "{value}"' for name, value in limits.items()]
    return emulated_config(device_bytes) + "\n".join(["[limits]", *lines]) + "\n"


def daemon_with(config: str, folder: Path, tiny_models: dict[str, Path]) -> Iterator[PrivateDaemon]:
    with private_daemon(config, folder, frontends=2) as daemon:
        for name in (LLAMA, QWEN2):
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        yield daemon


@pytest.fixture(scope="module")
def watched(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A daemon that soon takes a silent worker for hung."""
    config = config_with(device_bytes, hang_timeout="8s")
    yield from daemon_with(config, tmp_path_factory.mktemp("watched"), tiny_models)


@pytest.fixture(scope="module")
def patient(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A daemon that gives a worker all the time, and a request little."""
    config = config_with(device_bytes, hang_timeout="1000s", token_timeout="10s")
    yield from daemon_with(config, tmp_path_factory.mktemp("patient"), tiny_models)


@pytest.fixture(scope="module")
def usual(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A daemon with the defaults."""
    config = emulated_config(device_bytes)
    yield from daemon_with(config, tmp_path_factory.mktemp("usual"), tiny_models)


@pytest.fixture
async def api(usual: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    async with api_client(usual.http_url) as client:
        yield client


def worker(daemon: PrivateDaemon) -> psutil.Process:
    return child(daemon, "worker")


def has_another_worker(daemon: PrivateDaemon, than: psutil.Process) -> bool:
    try:
        return worker(daemon) != than
    except ValueError:  # none at present
        return False


def states(daemon: PrivateDaemon) -> dict[str, str]:
    return {row.name: row.state for row in ps(daemon).models}


def is_whole(daemon: PrivateDaemon, but: psutil.Process | None = None) -> bool:
    """Return whether all models are ready, on another worker than that one."""
    row = device(daemon)
    is_new = but is None or row.pid not in (None, but.pid)
    return row.state == "ready" and is_new and set(states(daemon).values()) == {"ready"}


def is_back_without(daemon: PrivateDaemon, ended: psutil.Process) -> bool:
    """Return whether another worker has what is to be loaded."""
    return device(daemon).pid not in (None, ended.pid) and "loading" not in states(daemon).values()


def is_idle(daemon: PrivateDaemon) -> bool:
    """Return whether the worker has no request, and no KV that is anybody's."""
    with daemon.client() as client:
        try:
            leftovers(client)
        except Refused:
            return False
    return device(daemon).kv_host_bytes == 0


def told(daemon: PrivateDaemon, kind: str) -> list[str]:
    """The messages of all events of a kind."""
    with daemon.client() as client:
        return [event.message for event in client.events() if event.kind == kind]


@pytest.mark.slow
async def test_a_hung_worker_is_replaced_and_its_streams_go_on(watched: PrivateDaemon) -> None:
    async with api_client(watched.http_url) as api:
        alone = await ask(api, LLAMA, PROMPT, 300)
        stream = Background(api, LLAMA, PROMPT, 300)
        await stream.started()
        hung = worker(watched)
        hung.suspend()
        assert await stream.finished() == alone
    await eventually(lambda: is_whole(watched, but=hung), BACK_S)
    # Whichever is noticed first: no message, or a turn without a step.
    assert any("(hung: " in text for text in told(watched, "worker_down"))
    assert check(watched)


@pytest.mark.slow
async def test_an_idle_worker_that_hangs_is_replaced(watched: PrivateDaemon) -> None:
    await eventually(lambda: is_whole(watched) and not ps(watched).requests, BACK_S)
    hung = worker(watched)
    hung.suspend()
    await eventually(lambda: is_whole(watched, but=hung), BACK_S)
    assert told(watched, "model_quarantined") == []


@pytest.mark.slow
async def test_no_request_waits_longer_than_the_bound(patient: PrivateDaemon) -> None:
    async with api_client(patient.http_url) as api:
        alone = await ask(api, LLAMA, PROMPT)
        streams = [Background(api, name, f"{n}", LONG) for name in (LLAMA, QWEN2) for n in range(2)]
        for stream in streams:
            await stream.started()
        silent = worker(patient)
        silent.suspend()
        try:
            late = Background(api, QWEN2, "later", LONG)
            async with asyncio.timeout(BACK_S):
                outcomes = await asyncio.gather(
                    *(stream.finished() for stream in (*streams, late)), return_exceptions=True
                )
        finally:
            silent.resume()
        for outcome in outcomes:
            assert isinstance(outcome, openai.APIError), outcome
            assert "no token for 10 s: " in str(outcome)
        assert any("device 0" in str(outcome) for outcome in outcomes)
        await eventually(lambda: not ps(patient).requests)
        # It was never replaced, and has nothing left of them.
        assert worker(patient).pid == silent.pid
        await eventually(lambda: is_idle(patient))
        assert await ask(api, LLAMA, PROMPT) == alone
    assert check(patient)


@pytest.mark.slow
async def test_killed_by_somebody_again_and_again(usual: PrivateDaemon, api: AsyncOpenAI) -> None:
    """That is nobody's fault: every request is answered, and nothing is in quarantine."""
    jobs = [(name, f"killed {n}", LONG) for name in (LLAMA, QWEN2) for n in range(2)]
    alone = [await ask(api, *job) for job in jobs]
    streams = [Background(api, *job) for job in jobs]
    num_kills = 0
    while any(stream.is_running for stream in streams) and num_kills < 6:
        await eventually(lambda: device(usual).state == "ready", BACK_S)
        await asyncio.sleep(0.5)
        killed = worker(usual)
        killed.kill()
        num_kills += 1
        await eventually(functools.partial(has_another_worker, usual, killed), BACK_S)
    assert [await stream.finished() for stream in streams] == alone
    assert num_kills >= 2
    await eventually(lambda: is_whole(usual), BACK_S)
    assert told(usual, "model_quarantined") == []


@pytest.mark.slow
async def test_out_of_memory_is_told(usual: PrivateDaemon, api: AsyncOpenAI) -> None:
    """The worker gets no more memory, and its first long prompts need some."""
    await eventually(lambda: is_whole(usual), BACK_S)
    starved = worker(usual)
    for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_DATA):
        starved.rlimit(kind, (1 << 20, 1 << 20))
    jobs: list[tuple[str, str, int]] = []
    answers: list[Answer] = []
    # More at once each time: what the worker has already may do for the first.
    while device(usual).pid == starved.pid and len(jobs) < 60:
        more = [(QWEN2, f"{n + len(jobs)} long stories " * 40, 50) for n in range(3 + len(jobs))]
        answers += await asyncio.gather(*(ask(api, *job) for job in more))
        jobs += more
    await eventually(lambda: is_whole(usual, but=starved), BACK_S)
    assert "out of memory" in told(usual, "worker_down")[-1]
    assert answers == [await ask(api, *job) for job in jobs]


@pytest.mark.slow
async def test_a_request_whose_worker_always_crashes(
    usual: PrivateDaemon, api: AsyncOpenAI
) -> None:
    """It gets past the first crashes. Then it runs alone, so that the last is its own fault."""
    await eventually(lambda: is_whole(usual), BACK_S)
    expected = await ask(api, QWEN2, PROMPT)
    victim_alone = await ask(api, LLAMA, PROMPT, LONG)
    stream = Background(api, LLAMA, PROMPT, LONG)
    await stream.started()
    num_crashes = 0
    while stream.is_running and num_crashes < 9:  # some come between two of its steps
        await crash_when_it_goes_on(usual, stream)
        num_crashes += 1
    with pytest.raises(
        openai.APIError, match=r"crashed a second worker when retried alone: .*signal 11"
    ):
        await stream.finished()
    assert num_crashes >= 3
    await eventually(lambda: is_whole(usual), BACK_S)
    assert told(usual, "model_quarantined") == []
    step = f"activity: a step of {LLAMA}"
    downs = told(usual, "worker_down")[-num_crashes:]
    # Without the number of requests if a crash came before the step had begun.
    assert any(f"{step} with 1 request" in down for down in downs)
    assert step in downs[-1]
    assert await ask(api, QWEN2, PROMPT) == expected
    assert await ask(api, LLAMA, PROMPT, LONG) == victim_alone


async def crash_when_it_goes_on(daemon: PrivateDaemon, stream: Background) -> None:
    """Crash the worker when a stream has got tokens since; its model is all that runs."""
    num_tokens = len(stream.answer.token_ids)
    await eventually(
        lambda: not stream.is_running or len(stream.answer.token_ids) > num_tokens + 20, BACK_S
    )
    if not stream.is_running:
        return
    ended = worker(daemon)
    ended.send_signal(signal.SIGSEGV)
    await eventually(lambda: is_back_without(daemon, ended), BACK_S)


@pytest.mark.slow
def test_a_frontend_that_hangs_is_replaced_and_others_answer(watched: PrivateDaemon) -> None:
    until(lambda: are_frontends_ready(watched), BACK_S)
    hung = frontend(watched, 1)
    hung.suspend()
    urls = [f"{watched.http_url}/v1/models"] * 20
    assert {httpx.get(url, timeout=BACK_S).status_code for url in urls} == {200}
    assert hung.status() == psutil.STATUS_STOPPED, "all were answered by the other"
    until(lambda: any("hung" in text for text in told(watched, "frontend_down")), BACK_S)
    until(lambda: are_frontends_ready(watched), BACK_S)
    assert frontend(watched, 1).pid != hung.pid


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    """Two simulated devices and two models on both."""
    folder = tmp_path_factory.mktemp("box")
    with sim_daemon('devices = ["sim:2xH800"]', folder, ("one", "two")) as daemon:
        yield daemon


async def test_a_crash_leaves_streams_on_other_devices_alone(box: PrivateDaemon) -> None:
    async with api_client(box.http_url) as api:
        other = Background(api, "two", PROMPT, 400)
        await other.started()
        quiet = device_of(box, "two")
        victim = Background(api, "one", PROMPT, 120)
        await victim.started()
        crashed = device_of(box, "one")
        assert crashed.device != quiet.device
        assert crashed.pid is not None
        psutil.Process(crashed.pid).send_signal(signal.SIGSEGV)
        assert len((await victim.finished()).token_ids) == 120
        assert device_of(box, "two").pid == quiet.pid
        assert len((await other.finished()).token_ids) == 400
        assert told(box, "model_quarantined") == []


def device_of(daemon: PrivateDaemon, model: str) -> DeviceInfo:
    """The device that has the only request of a model."""
    now = ps(daemon)
    [request] = [one for one in now.requests if one.model == model]
    [found] = [one for one in now.devices if one.device == request.device]
    return found
