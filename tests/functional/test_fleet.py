"""Two real daemons as a fleet: models are placed, requests routed, streams survive a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupoold.access.secret import make_key
from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.api.schemas_models import AddModelRequest, SetModelRequest
from gpupoold.fleet.cluster import FleetSpec
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    api_client,
    emulated_config,
    eventually,
    private_daemon,
    weight_bytes,
)
from tests.functional.fleet_box import LocalFleet, local_fleet
from tests.unit.checkpoints.fake_hub import run_hub

NUM_TOKENS = 120
NUM_STREAMS = 4


@pytest.fixture
def daemons(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path: Path
) -> Iterator[dict[str, PrivateDaemon]]:
    config = emulated_config(device_bytes)
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(private_daemon(config, tmp_path / name))
            for name in ("east", "west")
        }


@pytest.fixture
async def fleet(daemons: dict[str, PrivateDaemon], tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with local_fleet(daemons, tmp_path) as fleet:
        yield fleet


@pytest.fixture
def spec(tiny_models: dict[str, Path]) -> Callable[..., FleetSpec]:
    def make(name: str, least_replicas: int = 1) -> FleetSpec:
        request = AddModelRequest(name=name, source=str(tiny_models[name]), **LOAD_OPTIONS)
        return FleetSpec(request, least_replicas)

    return make


def serving(fleet: LocalFleet, model: str) -> list[str]:
    nodes = fleet.controller.table.nodes
    return sorted(one.name for one in nodes if one.takes_requests and one.serves(model))


def kill(daemon: PrivateDaemon) -> None:
    """As when a machine dies: nothing of the daemon says goodbye."""
    for process in descendants(daemon):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    daemon.process.kill()
    daemon.process.wait()


async def stream(api: AsyncOpenAI, model: str, words: str) -> tuple[str, str]:
    """The text of an answer, and the reason of its end."""
    text, reason = "", ""
    answer = await api.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": words}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in answer:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


async def test_a_node_dies(fleet: LocalFleet, spec: Callable[..., FleetSpec]) -> None:
    fleet.controller.add_model(spec(LLAMA, 2))
    fleet.controller.add_model(spec(QWEN2))
    await eventually(lambda: len(serving(fleet, LLAMA)) == 2, timeout_s=90)
    await eventually(lambda: len(serving(fleet, QWEN2)) == 1, timeout_s=90)
    doomed = serving(fleet, QWEN2)[0]
    words = [f"Tell me of the sea, part {n}" for n in range(NUM_STREAMS)]
    async with api_client(fleet.url) as api:
        names = [row.id async for row in await api.models.list()]
        assert names == [LLAMA, QWEN2]
        undisturbed = [await stream(api, LLAMA, one) for one in words]
        assert {reason for _, reason in undisturbed} == {"length"}
        running = [asyncio.create_task(stream(api, LLAMA, one)) for one in words]

        def are_spread() -> bool:
            models = [one.model(LLAMA) for one in fleet.controller.table.nodes]
            return all(model is not None and model.num_live for model in models)

        await eventually(are_spread)
        kill(fleet.daemons[doomed])
        assert await asyncio.gather(*running) == undisturbed
        # The model that the dead node alone had is placed on the other one.
        await eventually(lambda: len(serving(fleet, QWEN2)) == 1, timeout_s=90)
        assert (await stream(api, QWEN2, "Who is there?"))[1] == "length"


@pytest.mark.slow
async def test_a_node_is_drained(fleet: LocalFleet, spec: Callable[..., FleetSpec]) -> None:
    fleet.controller.add_model(spec(LLAMA))
    await eventually(lambda: len(serving(fleet, LLAMA)) == 1, timeout_s=90)
    (home,) = serving(fleet, LLAMA)
    async with api_client(fleet.url) as api:
        running = asyncio.create_task(stream(api, LLAMA, "Tell me of the sea"))
        await asyncio.sleep(0.5)
        fleet.controller.drain(home, is_draining=True)
        await eventually(lambda: serving(fleet, LLAMA) not in ([], [home]), timeout_s=90)
        assert (await running)[1] == "length"
        assert (await stream(api, LLAMA, "Tell me of the sea"))[1] == "length"
        await eventually(
            lambda: all(
                one.model(LLAMA) is None for one in fleet.controller.table.nodes if one.name == home
            ),
            timeout_s=60,
        )
        with pytest.raises(openai.NotFoundError):
            await stream(api, "nobody", "Who?")
        await fleet.controller.remove_model(LLAMA)
        await eventually(lambda: not serving(fleet, LLAMA), timeout_s=60)


@pytest.mark.slow
async def test_a_key_of_the_fleet(fleet: LocalFleet) -> None:
    key = make_key()
    request = AddKeyRequest(name="web", id=key.id, digest=key.digest, models=("elsewhere",))

    def having() -> int:
        return sum(key.id in one.report.key_names for one in fleet.controller.table.nodes)

    async def status() -> int:
        headers = {"authorization": f"Bearer {key.text}"}
        async with httpx.AsyncClient(base_url=fleet.url, headers=headers) as http:
            return (await http.get("/v1/models")).status_code

    await eventually(lambda: len(fleet.controller.table.nodes) == 2)
    await asyncio.sleep(1)
    assert await status() == 401
    fleet.controller.add_key(request)
    await eventually(lambda: having() == 2)
    assert await status() == 200
    fleet.controller.remove_key("web")
    await eventually(lambda: having() == 0)
    assert await status() == 401


@pytest.mark.slow
async def test_rates_of_a_key_hold_for_all_nodes(
    fleet: LocalFleet, spec: Callable[..., FleetSpec]
) -> None:
    key = make_key()
    request = AddKeyRequest(name="web", id=key.id, digest=key.digest, requests_per_minute=6)
    fleet.controller.add_key(request)
    fleet.controller.add_model(spec(LLAMA, 2))
    await eventually(lambda: len(serving(fleet, LLAMA)) == 2, timeout_s=90)
    east, west = (one.url for one in fleet.controller.table.nodes)

    async def statuses(url: str, num: int) -> list[int]:
        headers = {"authorization": f"Bearer {key.text}"}
        body = {"model": LLAMA, "prompt": "Hello", "max_tokens": 1}
        async with httpx.AsyncClient(headers=headers, timeout=30) as http:
            return [
                (await http.post(f"{url}/v1/completions", json=body)).status_code
                for _ in range(num)
            ]

    def num_known() -> int:
        known = [one.report.rate_uses[key.id] for one in fleet.controller.table.nodes]
        return sum(use.num_requests for use in known)

    began_s = time.monotonic()
    assert await statuses(east, 3) + await statuses(west, 3) == [200] * 6
    await eventually(lambda: num_known() == 6)
    await asyncio.sleep(1.5)  # both agents have charged their daemons
    refused = await statuses(east, 2) + await statuses(west, 2) + await statuses(fleet.url, 2)
    # One more request every ten seconds.
    assert refused.count(429) >= 6 - (time.monotonic() - began_s) // 10, refused


@pytest.mark.slow
async def test_a_change_reaches_all_nodes(
    fleet: LocalFleet, spec: Callable[..., FleetSpec]
) -> None:
    fleet.controller.add_model(spec(LLAMA, 2))
    await eventually(lambda: len(serving(fleet, LLAMA)) == 2, timeout_s=90)

    def settings() -> set[tuple[float, float, str]]:
        models = [one.model(LLAMA) for one in fleet.controller.table.nodes]
        return {(one.ttft_s, one.tbt_s, one.pace) for one in models if one is not None}

    [(_, tbt_s, _)] = settings()
    fleet.controller.set_model(LLAMA, SetModelRequest(ttft_s=3.3, pace="steady"), None)
    await eventually(lambda: settings() == {(3.3, tbt_s, "steady")})
    fleet.controller.set_model(LLAMA, SetModelRequest(pace="off"), None)
    await eventually(lambda: {pace for *_, pace in settings()} <= {"", "off"})
    await asyncio.sleep(3)  # some further placements
    assert not fleet.controller.problems


@pytest.mark.slow
async def test_weights_come_from_the_other_node(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_models[LLAMA].iterdir()}
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with run_hub() as hub, contextlib.ExitStack() as stack:
        hub.add("org/good", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        config = emulated_config(device_bytes)
        daemons = {
            name: stack.enter_context(private_daemon(config, tmp_path / name))
            for name in ("east", "west")
        }
        async with local_fleet(daemons, tmp_path) as fleet:
            request = AddModelRequest(name="good", source="org/good", **LOAD_OPTIONS)
            fleet.controller.add_model(FleetSpec(request))
            await eventually(lambda: len(serving(fleet, "good")) == 1, timeout_s=90)
            sent = sum(one.sent_bytes for one in hub.downloads("model.safetensors"))
            assert sent >= weight_bytes(tiny_models[LLAMA])
            hub.requests.clear()
            fleet.controller.add_model(FleetSpec(request, 2))
            await eventually(lambda: len(serving(fleet, "good")) == 2, timeout_s=90)
            sent = sum(one.sent_bytes for one in hub.downloads("model.safetensors"))
            assert sent < weight_bytes(tiny_models[LLAMA]) / 10, "more than the header"


@pytest.mark.slow
async def test_bad_requests_are_told(fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.url) as http:
        for path, body, status in (
            ("/v1/chat/completions", b"{", 400),
            ("/v1/chat/completions", b'{"model": 5}', 400),
            ("/v1/chat/completions", b"{}", 404),
            ("/v1/batches", b"{}", 404),
        ):
            answer = await http.post(path, content=body)
            assert answer.status_code == status, (path, body)
            assert answer.json()["error"]["message"]
        await eventually(lambda: bool(fleet.controller.table.nodes))
        assert (await http.get("/health")).status_code == 200
