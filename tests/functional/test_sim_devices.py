"""A box of simulated GPUs behind the real daemon, frontend and command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupoold.api.schemas import DeviceInfo
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.errors import Refused
from gpupoold.latency.shape import builtin_shape
from tests.conftest import ROOT
from tests.functional.daemon_tools import (
    SIM_SHAPE,
    admin_http,
    api_client,
    ask,
    cli,
    open_stream,
    ps,
    until,
    usage,
)

JSON = "application/json"
MODELS = ("one", "two", "three")
WEIGHT_BYTES = builtin_shape(SIM_SHAPE).weight_bytes


@pytest.fixture
def box(sim_box: PrivateDaemon) -> PrivateDaemon:
    return sim_box


def test_all_models_answer_in_time_although_a_device_has_room_for_one(box: PrivateDaemon) -> None:
    async def run() -> list[int]:
        async with api_client(box.http_url) as api:
            asked = (ask(api, name, "to whom it may concern", 40) for name in MODELS * 4)
            return [len(answer.token_ids) for answer in await asyncio.gather(*asked)]

    assert asyncio.run(run()) == [40] * 12
    now = ps(box)
    assert sum(model.tokens for model in now.models) >= 480
    assert all(model.attainment == 1.0 for model in now.models)
    assert now.num_switches >= 3
    until(lambda: not ps(box).requests)
    for row in ps(box).devices:
        assert row.device_bytes < 2 * WEIGHT_BYTES
        assert held_bytes(row) == 0 or WEIGHT_BYTES <= held_bytes(row) <= row.device_bytes
    assert accounts_agree(box)


def test_devices_are_what_they_simulate(box: PrivateDaemon) -> None:
    first, second = ps(box).devices
    assert (first.kind, second.kind) == ("sim", "sim")
    assert first.device_bytes == 20 * 2**30
    assert second.device_bytes == pytest.approx(0.9 * 24_146_608_128, abs=1)
    processes = [one for one in descendants(box) if "gpupoold.simdevice" in one.cmdline()]
    assert len(processes) == 2
    assert all(one.memory_info().rss < 60e6 for one in processes)
    with box.client() as client:
        assert client.status().model_cache_bytes == 0
        [model] = [model for model in client.models() if model.name == "one"]
    assert model.weight_bytes == WEIGHT_BYTES
    assert model.latency is not None
    assert model.latency.device in ("sim:H800", "sim:A10")
    assert model.latency.decode_step_s(1, 100) is not None


def test_command_line_shows_them(box: PrivateDaemon) -> None:
    shown = cli(box, "ps")
    assert shown.returncode == 0, shown.stderr
    assert "sim" in shown.stdout
    shown = cli(box, "show", "one")
    assert "sim:" in shown.stdout


def test_the_decisions_are_recorded_and_replayed(box: PrivateDaemon, tmp_path: Path) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            await asyncio.gather(*(ask(api, name, "and so on", 20) for name in MODELS))

    asyncio.run(run())
    until(lambda: not ps(box).requests)
    path = tmp_path / "log.jsonl"
    done = cli(box, "replay", "--record", str(path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    replayed = json.loads(done.stdout)
    assert replayed["is_equal"]
    assert replayed["actions"]["Send"] >= len(MODELS)
    with admin_http(box) as http:
        assert http.get("/event-log").content.startswith(path.read_bytes())

    nobody = tmp_path / "no.sock"
    text = path.read_text()
    path.write_text(text.replace('{"type":"Send"', '{"type":"Sent"', 1))
    assert cli(nobody, "replay", str(path)).returncode == 2
    changed = text.replace('"type":"Send","request_id":"', '"type":"Send","request_id":"not-', 1)
    path.write_text(changed)
    done = cli(nobody, "replay", str(path))
    assert done.returncode == 1
    assert "recorded [Send(request_id='not-" in done.stderr


def test_what_needs_an_engine_is_refused(box: PrivateDaemon) -> None:
    body = {"operation": "bench_switch", "arguments": {}}
    with admin_http(box) as http:
        answer = http.post("/devices/0/operations", json=body)
    assert answer.status_code == 409
    assert "simulates a H800 and cannot do bench_switch" in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models", {"name": "\ud800", "source": "/tmp"}),
        ("/models", {"name": "a", "source": "/tmp/\ud800"}),
        ("/models", {"name": "a", "source": "/tmp", "aliases": ["\ud800"], "dtype": "\ud800"}),
        ("/presets", {"name": "\ud800", "model": "one", "path": "\ud800"}),
        ("/keys", {"name": "\ud800"}),
        ("/keys", {"name": "a", "models": ["\ud800"]}),
        ("/devices/0/operations", {"operation": "\ud800", "arguments": {}}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(
    box: PrivateDaemon, path: str, body: dict[str, Any]
) -> None:
    with admin_http(box) as http:
        answer = http.post(path, content=json.dumps(body), headers={"content-type": JSON})
    assert answer.status_code < 500  # 200 is for the beginning of progress
    assert json.loads(answer.text.splitlines()[-1])["error"]["message"]


def test_leaving_client_frees_its_kv(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            stream = await open_stream(api, "one", "a long story", 3000)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(run())
    until(lambda: not ps(box).requests)
    until(lambda: usage(box, "one").kv_resident_bytes == 0)


def test_stop_strings_end_an_answer(box: PrivateDaemon) -> None:
    async def run() -> tuple[str, str | None]:
        async with api_client(box.http_url) as api:
            whole = await ask(api, "two", "hello", 40)
            cut = await api.completions.create(
                model="two", prompt="hello", max_tokens=400, stop=[" "], temperature=0
            )
            return whole.text, cut.choices[0].finish_reason

    text, reason = asyncio.run(run())
    assert text
    assert reason == "stop"
    until(lambda: not ps(box).requests)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_probabilities_of_synthetic_tokens_are_refused(
    box: PrivateDaemon, is_streamed: bool
) -> None:
    body = {"model": "two", "prompt": "hello", "max_tokens": 5, "logprobs": 1}
    answer = httpx.post(f"{box.http_url}/v1/completions", json=body | {"stream": is_streamed})
    assert "logprobs are not available" in answer.text
    assert is_streamed or answer.status_code == 400
    until(lambda: not ps(box).requests)


def test_what_no_device_can_hold_is_refused(box: PrivateDaemon, tmp_path: Path) -> None:
    heavy = make_dummy_checkpoint(tmp_path, "Llama-2-13B")
    with pytest.raises(Refused, match="do not fit on a device"):
        box.add_model("heavy", heavy)
    with pytest.raises(Refused, match="limit of 32768"):
        box.add_model("long", Path(usage_path(box)), max_model_len=2_000_000)
    assert {model.name for model in ps(box).models} == set(MODELS)


def held_bytes(row: DeviceInfo) -> int:
    return row.device_bytes - row.free_bytes


def accounts_agree(box: PrivateDaemon) -> bool:
    with admin_http(box) as http:
        return http.post("/check").status_code == 200


def usage_path(box: PrivateDaemon) -> str:
    with box.client() as client:
        return client.models()[0].path


def test_killed_device_comes_back_with_its_models(box: PrivateDaemon) -> None:
    pid = ps(box).devices[0].pid
    assert pid is not None
    psutil.Process(pid).kill()
    until(lambda: ps(box).devices[0].pid not in (None, pid), 30)
    until(lambda: all(model.weights_total_bytes for model in ps(box).models), 30)

    async def run() -> None:
        async with api_client(box.http_url) as api:
            for name in MODELS:
                assert len((await ask(api, name, "again", 5)).token_ids) == 5

    asyncio.run(run())


def test_removed_model_is_gone(box: PrivateDaemon) -> None:
    box.add_model("short-lived", Path(usage_path(box)), max_model_len=4096)
    with box.client() as client:
        client.remove_model("short-lived", "refuse")

    async def run() -> None:
        async with api_client(box.http_url) as api:
            with pytest.raises(openai.NotFoundError):
                await ask(api, "short-lived", "hello", 5)

    asyncio.run(run())
    assert accounts_agree(box)


@pytest.mark.slow
def test_loaded_box_does_what_the_simulator_says(project_env: dict[str, str]) -> None:
    command = [sys.executable, "benchmarks/sim_devices.py", "--devices", "4xH800", "--models", "8"]
    command += ["--rps", "12", "--duration", "20", "--max-output", "500"]
    done = subprocess.run(
        command, cwd=ROOT, env=project_env, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    row = json.loads(done.stdout)
    assert done.returncode == 0, row
    assert (row["num_errors"], row["completed"]) == (0, row["requests"])
    assert abs(row["difference"]) <= 0.03
