"""LoRA adapters on a device too small for all: exact, added and removed while answers run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.domain import RemoveMode
from gpupoold.errors import Refused
from tests.functional.daemon_tools import (
    LLAMA,
    MIXTRAL,
    QWEN2,
    Background,
    api_client,
    ask,
    check,
    cli,
    device,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    until,
    usage,
    weight_bytes,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

# Name, rank; the last adapter needs an engine for higher ranks.
RANKS = {"first": 8, "second": 4, "third": 20}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
PROMPT = "An adapter changes"
LENGTH = 300
BACK_S = 120.0
MAY_HAVE_ADAPTERS = ("--engine", "max-lora-rank=8")


@pytest.fixture(scope="module")
def adapters(
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    project_env: dict[str, str],
) -> Path:
    """A folder with adapters of the Llama."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, rank in RANKS.items():
        base = str(tiny_models[LLAMA])
        command = [sys.executable, "-m", "tests.support.tiny_adapter", str(folder)]
        subprocess.run(
            [*command, "--base", base, "--name", name, "--rank", str(rank)],
            check=True,
            capture_output=True,
            env=project_env,
        )
    return folder


@pytest.fixture(scope="module")
def alone(
    adapters: Path, tiny_models: dict[str, Path], project_env: dict[str, str]
) -> dict[str, list[int]]:
    """The answers of vLLM alone: of the model, and of each adapter."""
    env = project_env | {
        "GPUPOOL_PLAIN_LINEAR": "1",
        "OMP_NUM_THREADS": "1",  # two threads that spin for each other are far slower
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, str(tiny_models[LLAMA]), str(adapters)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    assert len({tuple(tokens[:8]) for tokens in found.values()}) == len(found)
    return found


@pytest.fixture(scope="module")
def daemon(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """Two models, on a device with room for one of them with slots of adapters."""
    device_bytes = int(2.05 * weight_bytes(tiny_models[LLAMA]))
    config = emulated_config(device_bytes)
    with private_daemon(config, tmp_path_factory.mktemp("adapters-daemon")) as daemon:
        daemon.add_model(LLAMA, tiny_models[LLAMA], **OPTIONS)
        daemon.add_model(QWEN2, tiny_models[QWEN2], **OPTIONS)
        yield daemon
        until(lambda: not ps(daemon).requests)
        check(daemon)


async def add(daemon: PrivateDaemon, name: str, source: Path, base: str = LLAMA) -> str:
    """Add an adapter by the command line; return the command's messages."""
    arguments = ("add-adapter", name, "--of", base, "--source", str(source), "--ttft", "9s")
    done = await asyncio.to_thread(cli, daemon, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


async def remove(daemon: PrivateDaemon, name: str, mode: RemoveMode) -> None:
    """Remove an adapter, faster than by the command line: answers are short."""

    def call() -> None:
        with daemon.client() as client:
            client.remove_model(name, mode)

    await asyncio.to_thread(call)


def model(daemon: PrivateDaemon, name: str = LLAMA) -> ModelInfo:
    with daemon.client() as client:
        return client.model(name)


async def assert_all_as_alone(
    daemon: PrivateDaemon, alone: dict[str, list[int]], names: tuple[str, ...]
) -> None:
    """Ask for the adapters and both models at the same time, each twice."""
    async with api_client(daemon.http_url) as api:
        other = await ask(api, QWEN2, PROMPT, LENGTH)
        asked = [name for name in names for _ in range(2)]
        answers = [ask(api, name, PROMPT, LENGTH) for name in (*asked, QWEN2)]
        *ours, theirs = await asyncio.gather(*answers)
        assert theirs.token_ids == other.token_ids
        assert [one.token_ids for one in ours] == [alone[name] for name in asked]


async def test_the_first_adapter_is_added_while_answers_run(
    daemon: PrivateDaemon, adapters: Path, alone: dict[str, list[int]]
) -> None:
    async with api_client(daemon.http_url) as api:
        expected = await ask(api, QWEN2, PROMPT, LENGTH)
        streams = [Background(api, name, PROMPT, LENGTH) for name in (LLAMA, LLAMA, QWEN2)]
        await asyncio.gather(*(stream.started() for stream in streams))
        assert "an adapter of tiny-llama, rank 8" in await add(daemon, "first", adapters / "first")
        answers = [await stream.finished() for stream in streams]
        assert [one.token_ids for one in answers[:2]] == [alone[LLAMA]] * 2
        assert answers[2].token_ids == expected.token_ids
    assert model(daemon).engine == {"max_lora_rank": "16", "max_loras": "4"}
    await assert_all_as_alone(daemon, alone, (LLAMA, "first"))


async def test_further_adapters_are_added_to_the_same_engine(
    daemon: PrivateDaemon, adapters: Path, alone: dict[str, list[int]]
) -> None:
    before = model(daemon).engine
    await add(daemon, "second", adapters / "second")
    assert model(daemon).engine == before
    await assert_all_as_alone(daemon, alone, (LLAMA, "first", "second"))


async def test_an_adapter_is_a_model_to_clients(
    daemon: PrivateDaemon, alone: dict[str, list[int]]
) -> None:
    rows = httpx.get(f"{daemon.http_url}/v1/models").json()["data"]
    parents = {row["id"]: row.get("parent") for row in rows}
    assert parents == {LLAMA: None, QWEN2: None, "first": LLAMA, "second": LLAMA}
    one = httpx.get(f"{daemon.http_url}/v1/models/first").json()
    assert (one["parent"], one["status"]) == (LLAMA, "ready")
    async with api_client(daemon.http_url) as api:
        chat = await api.chat.completions.create(
            model="first", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert chat.model == "first"
    metrics = httpx.get(f"{daemon.http_url}/metrics").text
    assert 'gpupool_output_tokens_total{model="first"}' in metrics
    history = cli(daemon, "history", "first", "--json")
    assert json.loads(history.stdout), history.stderr
    shown = cli(daemon, "show", LLAMA).stdout
    assert "adapter first" in shown
    assert "rank 8, ttft 9s, " in shown


async def test_answers_survive_the_end_of_the_worker(
    daemon: PrivateDaemon, alone: dict[str, list[int]]
) -> None:
    async with api_client(daemon.http_url) as api:
        names = (LLAMA, "first", "second")
        streams = [Background(api, name, PROMPT, LENGTH) for name in names]
        await asyncio.gather(*(stream.started() for stream in streams))
        pid = device(daemon).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert all(stream.is_running for stream in streams)
        answers = await asyncio.wait_for(
            asyncio.gather(*(stream.finished() for stream in streams)), BACK_S
        )
    assert [one.token_ids for one in answers] == [alone[name] for name in names]


async def test_a_higher_rank_needs_another_engine_in_which_answers_go_on(
    daemon: PrivateDaemon, adapters: Path, alone: dict[str, list[int]]
) -> None:
    async with api_client(daemon.http_url) as api:
        streams = [Background(api, name, PROMPT, LENGTH) for name in ("first", "second")]
        await asyncio.gather(*(stream.started() for stream in streams))
        await add(daemon, "third", adapters / "third")
        answers = [await stream.finished() for stream in streams]
    assert [one.token_ids for one in answers] == [alone["first"], alone["second"]]
    assert model(daemon).engine == {"max_lora_rank": "32", "max_loras": "4"}
    await assert_all_as_alone(daemon, alone, (LLAMA, *RANKS))


def lose(folder: Path) -> None:
    """Leave nothing in the place of an adapter's folder."""


def make_endless(folder: Path) -> None:
    """Put an adapter in place whose expression takes for ever with the name of a layer."""
    shutil.copytree(folder.with_name("kept"), folder)
    file = folder / "adapter_config.json"
    endless = {"rank_pattern": {r"(\w+\.?)+!": 4}}
    file.write_text(json.dumps(json.loads(file.read_text()) | endless))


def make_pipe(folder: Path) -> None:
    """Put an adapter in place whose weights are a pipe that nobody writes."""
    shutil.copytree(folder.with_name("kept"), folder)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("swap", [lose, make_endless, make_pipe])
async def test_an_adapter_whose_folder_is_swapped_fails_alone(
    daemon: PrivateDaemon, adapters: Path, alone: dict[str, list[int]], swap: Callable[[Path], None]
) -> None:
    pid = device(daemon).pid
    assert pid is not None
    folder = adapters / "third"
    folder.rename(adapters / "kept")
    swap(folder)
    try:
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: device(daemon).pid not in (None, pid), BACK_S)
        await eventually(lambda: usage(daemon, LLAMA).state == "ready", BACK_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        (adapters / "kept").rename(folder)
    async with api_client(daemon.http_url) as api:
        assert (await ask(api, LLAMA, PROMPT, LENGTH)).token_ids == alone[LLAMA]
        with pytest.raises(openai.APIError, match="no longer has the adapter"):
            await ask(api, "third", PROMPT, 1)
        assert (await ask(api, "first", PROMPT, LENGTH)).token_ids == alone["first"]
    assert "adapter third was not loaded" in cli(daemon, "events").stdout
    await remove(daemon, "third", "refuse")
    await add(daemon, "third", adapters / "third")
    async with api_client(daemon.http_url) as api:
        assert (await ask(api, "third", PROMPT, LENGTH)).token_ids == alone["third"]


async def test_a_removed_adapter_leaves_its_base_alone(
    daemon: PrivateDaemon, adapters: Path, alone: dict[str, list[int]]
) -> None:
    async with api_client(daemon.http_url) as api:
        stream = Background(api, "second", PROMPT, LENGTH)
        await stream.started()
        with pytest.raises(Refused, match="live requests"):
            await remove(daemon, "second", "refuse")
        beside = Background(api, LLAMA, PROMPT, LENGTH)
        await remove(daemon, "second", "drain")
        assert (await stream.finished()).token_ids == alone["second"]
        assert (await beside.finished()).token_ids == alone[LLAMA]
        with pytest.raises(openai.NotFoundError, match="second"):
            await ask(api, "second", PROMPT, 1)
        # Another adapter of the same name has no KV of the first.
        await add(daemon, "second", adapters / "third")
        assert (await ask(api, "second", PROMPT, LENGTH)).token_ids == alone["third"]
        forced = Background(api, "second", PROMPT, LENGTH)
        await forced.started()
        await remove(daemon, "second", "force")
        with pytest.raises(openai.APIError, match="removed"):
            await forced.finished()
        assert (await ask(api, "first", PROMPT, LENGTH)).token_ids == alone["first"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("add-adapter", "first", "--of", QWEN2, "--source", "{first}"), "already"),
        (("add-adapter", "new", "--of", QWEN2, "--source", "{first}"), "another model"),
        (("add-adapter", "new", "--of", "nothing", "--source", "{first}"), "no model is named"),
        (("add-adapter", "new", "--of", LLAMA, "--source", "{folder}"), "is no adapter"),
        (("add-model", "new", "--source", "{first}"), "gpupool add-adapter"),
        (("unload", "first"), "has no memory of its own"),
        (("set", "first", "--ttft", "1s"), "is an adapter"),
        (("rm", LLAMA), "has the adapters first, third"),
        (("set", LLAMA, "--engine", "max-lora-rank=16"), "has the rank 20"),
        (("set", LLAMA, "--engine", "max-cpu-loras=1"), "would have 2 adapters"),
        (("add-model", "new", "--source", "{experts}", *MAY_HAVE_ADAPTERS), "mixture-of-experts"),
    ],
)
async def test_refusals_change_nothing(
    daemon: PrivateDaemon,
    adapters: Path,
    tiny_models: dict[str, Path],
    arguments: tuple[str, ...],
    text: str,
) -> None:
    before = model(daemon)
    places = {"first": adapters / "first", "folder": adapters, "experts": tiny_models[MIXTRAL]}
    done = await asyncio.to_thread(cli, daemon, *(one.format(**places) for one in arguments))
    assert done.returncode in (4, 5)
    assert text in done.stderr
    after = model(daemon)
    assert (after.engine, after.adapters, after.state) == (
        before.engine,
        before.adapters,
        before.state,
    )


async def test_a_key_for_an_adapter_is_no_key_for_its_base(daemon: PrivateDaemon) -> None:
    with daemon.client() as client:
        key = client.add_key(AddKeyRequest(name="for-first", models=("first",)))
    headers = {"Authorization": f"Bearer {key.text}"}

    async def can_list_one() -> bool:
        answer = await asyncio.to_thread(httpx.get, f"{daemon.http_url}/v1/models", headers=headers)
        return [row["id"] for row in answer.json().get("data", [])] == ["first"]

    await eventually(can_list_one)  # each frontend learns of a key soon after the answer
    for name, status in (("first", 200), (LLAMA, 404), ("third", 404)):
        body = {"model": name, "prompt": "Hi", "max_tokens": 1}
        answer = httpx.post(
            f"{daemon.http_url}/v1/completions", json=body, headers=headers, timeout=60
        )
        assert answer.status_code == status, answer.text


async def test_a_check_adds_nothing(daemon: PrivateDaemon, adapters: Path) -> None:
    arguments = ("add-adapter", "new", "--of", LLAMA, "--source", str(adapters / "first"))
    done = await asyncio.to_thread(cli, daemon, *arguments, "--check")
    assert "new: can be added to tiny-llama; not added" in done.stderr
    assert [one.name for one in model(daemon).adapters] == ["first", "third"]


async def test_a_model_is_removed_with_its_adapters(daemon: PrivateDaemon) -> None:
    await eventually(lambda: not ps(daemon).requests)
    done = await asyncio.to_thread(cli, daemon, "rm", LLAMA, "--drain")
    assert done.returncode == 0, done.stderr
    rows = httpx.get(f"{daemon.http_url}/v1/models").json()["data"]
    assert [row["id"] for row in rows] == [QWEN2]


def _vllm_alone(base: str, folder: Path) -> dict[str, list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 32}
    # Without a size of the KV, the share of a small NUMA node could be less than the engine has.
    options |= {"enforce_eager": True, "gpu_memory_utilization": 0.05}
    options |= {"kv_cache_memory_bytes": 64 << 20}
    llm = LLM(base, dtype="float32", max_model_len=512, **options)
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    found = {}
    for number, name in enumerate((LLAMA, *RANKS)):
        adapter = LoRARequest(name, number, str(folder / name)) if number else None
        [answer] = llm.generate(PROMPT, sampling, lora_request=adapter, use_tqdm=False)
        found[name] = list(answer.outputs[0].token_ids)
    return found


if __name__ == "__main__":
    print(json.dumps(_vllm_alone(sys.argv[1], Path(sys.argv[2]))))
