"""Answers about images are the same wherever, and however often, their request goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import AsyncOpenAI
from PIL import Image

from benchmarks.private_daemon import PrivateDaemon
from tests.functional import images
from tests.functional.daemon_tools import (
    api_client,
    check_all,
    emulated_config,
    eventually,
    frontend_pids,
    only_frontend,
    private_daemon,
    ps,
    until,
    usage,
    weight_bytes,
)
from tests.functional.images import ImageAnswer, Question, data_url, encoded, image_part, picture

pytestmark = pytest.mark.slow

QWEN2_5, QWEN3, GEMMA3 = MODELS = ("tiny-qwen2.5-vl", "tiny-qwen3-vl", "tiny-gemma3-vision")
QUESTIONS: tuple[Question, ...] = ((1,), (2, 3), ())
ASKED = [(model, question) for model in (QWEN2_5, QWEN3) for question in QUESTIONS]
LOAD_OPTIONS = {"dtype": "float32", "max_model_len": images.MAX_LEN}


@pytest.fixture(scope="module")
def daemon(
    vision_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """Two devices, each with room for one model and a half, and short turns."""
    num_bytes = int(1.6 * max(weight_bytes(vision_models[name]) for name in (QWEN2_5, QWEN3)))
    config = emulated_config(num_bytes, num_devices=2) + '[scheduling]\nquota_max = "30ms"\n'
    with private_daemon(config, tmp_path_factory.mktemp("vision"), frontends=2) as daemon:
        for name in (QWEN2_5, QWEN3):
            daemon.add_model(name, vision_models[name], **LOAD_OPTIONS)
        until(lambda: all(one.state == "ready" for one in ps(daemon).models), 60)
        yield daemon


@pytest.fixture
async def api(daemon: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    """A client; afterwards no request, no KV and no page is left over."""
    async with api_client(daemon.http_url) as client:
        yield client
    until(lambda: not ps(daemon).requests)
    until(lambda: all(row.kv_host_bytes == 0 for row in ps(daemon).devices))
    check_all(daemon)


@pytest.fixture
def http(daemon: PrivateDaemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.http_url, timeout=30) as client:
        yield client


async def test_tokens_of_vllm_alone(
    api: AsyncOpenAI, vision_models: dict[str, Path], project_env: dict[str, str]
) -> None:
    asked = [(QWEN2_5, question) for question in QUESTIONS]
    alone = await asyncio.to_thread(
        images.of_vllm_alone, vision_models[QWEN2_5], QUESTIONS, 40, project_env
    )
    assert await images.answers(api, asked, 40) == alone
    assert len({tuple(tokens[:8]) for tokens in alone}) == len(QUESTIONS)


async def test_paused_by_another_model(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    """Both models on one device that is half as large as the models."""
    expected = await images.answers(api, ASKED)
    with daemon.client() as client:
        client.drain(1)
        try:
            streams = [ImageAnswer(api, *one) for one in ASKED]
            assert [await stream.finished() for stream in streams] == expected
            switched = client.switches(model=QWEN3, device=0)
        finally:
            client.undrain(1)
    assert any(switch.weight_bytes for switch in switched)


async def test_paused_within_an_image(
    daemon: PrivateDaemon, api: AsyncOpenAI, vision_models: dict[str, Path]
) -> None:
    """Each image of 20 tokens is in two or three steps, between which another model runs."""
    steps = {"max_num_batched_tokens": "12", "max_num_seqs": "4"}
    question: Question = tuple(range(60, 76))
    expected = await images.answers(api, [(QWEN2_5, question)], 10)
    daemon.add_model("in-steps", vision_models[QWEN2_5], engine=steps, **LOAD_OPTIONS)
    with daemon.client() as client:
        client.drain(1)
        try:
            others = [ImageAnswer(api, QWEN3, (seed,)) for seed in range(4)]
            assert await images.answers(api, [("in-steps", question)], 10) == expected
            for other in others:
                await other.finished()
            switched = client.switches(model="in-steps", device=0, limit=200)
        finally:
            client.undrain(1)
        client.remove_model("in-steps")
    assert len(switched) > 1


async def test_migrated(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    expected = await images.answers(api, ASKED, 200)
    streams = [ImageAnswer(api, *one, 200) for one in ASKED]
    for stream in streams:
        await stream.started()
    num_drained = 0
    with daemon.client() as client:
        while num_drained < 4 or (num_drained < 8 and any(one.is_running for one in streams)):
            await asyncio.to_thread(client.drain, num_drained % 2)
            client.undrain(num_drained % 2)
            num_drained += 1
    assert [await stream.finished() for stream in streams] == expected


@pytest.mark.slow
async def test_workers_killed_in_the_middle(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    expected = await images.answers(api, ASKED, 200)
    streams = [ImageAnswer(api, *one, 200) for one in ASKED]
    for stream in streams:
        await stream.started()
    assert all(stream.is_running for stream in streams)
    pids = [row.pid for row in ps(daemon).devices]
    for pid in pids:
        assert pid is not None
        psutil.Process(pid).kill()
    assert [await stream.finished() for stream in streams] == expected
    await eventually(lambda: all(row.state == "ready" for row in ps(daemon).devices), 60)
    assert {row.pid for row in ps(daemon).devices}.isdisjoint(pids)


async def test_images_are_sent_to_every_worker_by_every_frontend(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    """An image is known to a frontend, but not to the worker, and the other way round."""
    question: Question = (17, 18)
    [expected] = await images.answers(api, [(QWEN2_5, question)], 20)
    with daemon.client() as client:
        for device in (0, 1):
            await asyncio.to_thread(client.drain, device)
            try:
                for number in range(len(frontend_pids(daemon))):
                    with only_frontend(daemon, number):
                        async with api_client(daemon.http_url) as other:
                            found = await images.answers(other, [(QWEN2_5, question)] * 2, 20)
                            assert found == [expected] * 2
            finally:
                client.undrain(device)


async def test_memory_of_encoders_is_shown_and_freed(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    await images.answers(api, [(QWEN2_5, (40, 41))], 3)
    await eventually(lambda: usage(daemon, QWEN2_5).encoder_bytes > 0)
    check_all(daemon)
    with daemon.client() as client:
        for drained in (1, 0):
            client.drain(drained)
            try:
                await images.answers(api, [(QWEN3, ())], 3)
            finally:
                client.undrain(drained)
    await eventually(lambda: usage(daemon, QWEN2_5).encoder_bytes == 0)


SMALL = data_url(encoded(picture(5, (40, 40))))
BAD = {
    "too many": ([image_part(SMALL)] * 17, "at most 16 images (limits.max_images)"),
    "too many pixels": (
        [image_part(data_url(encoded(Image.new("1", (6000, 6000)))))],
        "36,000,000 pixels in total, more than 32,000,000 (limits.max_image_pixels)",
    ),
    "other format": ([image_part(data_url(encoded(picture(5), "TIFF")))], "none of the formats"),
    "damaged": ([image_part(SMALL[:200])], "cannot be used"),
    "file": ([image_part("file:///etc/hostname")], "neither a data: URL nor"),
    "host": ([image_part("http://127.0.0.1/x.png")], "security.media_hosts"),
    "empty": ([image_part("")], "data is not provided"),
    "audio": (
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        "no audio",
    ),
    "video": (
        [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}],
        "no video",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(http: httpx.Client, case: str) -> None:
    content, said = BAD[case]
    body = {"model": QWEN2_5, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    for options in ({}, {"stream": True}):
        response = http.post("/v1/chat/completions", json=body | options)
        assert response.status_code == 400, response.text
        assert said in response.json()["error"]["message"]


def test_other_apis(http: httpx.Client) -> None:
    data = SMALL.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    body = {"model": QWEN3, "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    assert http.post("/v1/messages", json=body).json()["usage"]["output_tokens"] == 4
    use = {"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}
    body["messages"] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert http.post("/v1/messages", json=body).json()["usage"]["output_tokens"] == 4
    items = [{"type": "input_image", "image_url": SMALL, "detail": "auto"}]
    body = {"model": QWEN3, "max_output_tokens": 4, "input": [{"role": "user", "content": items}]}
    assert http.post("/v1/responses", json=body).json()["usage"]["output_tokens"] == 4


def test_a_clients_name_for_an_image_means_nothing(http: httpx.Client) -> None:
    """Else one client's image could answer for another's of the same ``uuid``."""

    def answer(seed: int, **name: str) -> str:
        part = image_part(data_url(encoded(picture(seed)))) | name
        body = {"model": QWEN3, "max_tokens": 20, "temperature": 0}
        body["messages"] = [{"role": "user", "content": [part]}]
        found = http.post("/v1/chat/completions", json=body).json()
        return str(found["choices"][0]["message"]["content"])

    assert answer(51, uuid="the same") == answer(51)
    assert answer(52, uuid="the same") == answer(52) != answer(51)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
async def test_every_family_under_pressure(
    name: str,
    vision_models: dict[str, Path],
    tiny_models: dict[str, Path],
    project_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """Beside a text model on a device for one of them: tokens of vLLM alone, also after a kill."""
    path, other = vision_models[name], tiny_models["tiny-qwen3"]
    questions = [*QUESTIONS, (4, 5, 6)]
    alone = await asyncio.to_thread(images.of_vllm_alone, path, questions, 150, project_env)
    config = emulated_config(int(1.6 * weight_bytes(path)))
    with private_daemon(config, tmp_path) as daemon:
        daemon.add_model(name, path, **LOAD_OPTIONS)
        daemon.add_model("text", other, **LOAD_OPTIONS)
        async with api_client(daemon.http_url) as api:
            for is_killed in (False, True):
                streams = [ImageAnswer(api, name, one, 150) for one in questions]
                texts = [ImageAnswer(api, "text", (), 150) for _ in questions]
                for stream in streams:
                    await stream.started()
                if is_killed:
                    [row] = ps(daemon).devices
                    assert row.pid is not None
                    psutil.Process(row.pid).kill()
                assert [await stream.finished() for stream in streams] == alone
                for text in texts:
                    await text.finished()
