"""Embeddings, scores and classes among chat models, on a device half as large as all models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    Background,
    api_client,
    ask,
    check,
    child,
    child_env,
    cli,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    until,
    usage,
    weight_bytes,
)
from tests.functional.known_latency import prepare_state

pytestmark = pytest.mark.slow

BERT, MODERN_BERT, QWEN3 = "tiny-bert-embed", "tiny-modernbert-embed", "tiny-qwen3-embed"
RERANKER, QWEN3_RERANKER = "tiny-bert-rerank", "tiny-qwen3-rerank"
CLASSIFIER = "tiny-bert-classify"
POOLING = (BERT, MODERN_BERT, QWEN3, RERANKER, QWEN3_RERANKER, CLASSIFIER)
TEXTS = [f"passage {n} says: {'on and on ' * n}" for n in range(12)]
QUERY = "which passage is it?"
JOBS = {
    **dict.fromkeys((BERT, MODERN_BERT, QWEN3), ("embed", TEXTS)),
    **dict.fromkeys((RERANKER, QWEN3_RERANKER), ("score", [QUERY, *TEXTS])),
    CLASSIFIER: ("classify", TEXTS),
}
NUM_TOKENS = 200
# Sums of a batch of texts may differ in the last bits of float32.
CLOSE = 2e-6

Vectors = list[list[float]]


@pytest.fixture(scope="module")
def alone(tiny_pooling_models: dict[str, Path]) -> dict[str, Vectors]:
    """What vLLM alone makes of the texts, one at a time."""
    jobs = [(str(tiny_pooling_models[name]), *job) for name, job in JOBS.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.functional.pooling_alone", json.dumps(jobs)],
        env=child_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(JOBS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def box(
    tiny_models: dict[str, Path],
    tiny_pooling_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrivateDaemon]:
    paths = {name: tiny_models[name] for name in (LLAMA, QWEN2)}
    paths |= {name: tiny_pooling_models[name] for name in POOLING}
    half = sum(map(weight_bytes, paths.values())) // 2
    folder = tmp_path_factory.mktemp("box")
    prepare_state(folder / "state", profiled=QWEN3)
    with private_daemon(emulated_config(half), folder) as daemon:
        for name, path in paths.items():
            options = LOAD_OPTIONS if name in (LLAMA, QWEN2) else {"dtype": "float32"}
            daemon.add_model(name, path, **options)
        yield daemon


@pytest.fixture
async def api(box: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    async with api_client(box.http_url) as client:
        yield client


@pytest.fixture
def http(box: PrivateDaemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=box.http_url, timeout=60) as client:
        yield client


async def embed(api: AsyncOpenAI, model: str) -> Vectors:
    made = await api.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    return [one.embedding for one in made.data]


async def post(api: AsyncOpenAI, path: str, **body: Any) -> dict[str, Any]:
    """A call that the official client has no method for."""
    root = str(api.base_url).removesuffix("/v1/")
    async with httpx.AsyncClient(base_url=root, timeout=120) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def rerank(api: AsyncOpenAI, model: str) -> Vectors:
    made = await post(api, "/v2/rerank", model=model, query=QUERY, documents=TEXTS)
    by_index = {one["index"]: one["relevance_score"] for one in made["results"]}
    scores = [one["relevance_score"] for one in made["results"]]
    assert scores == sorted(scores, reverse=True)
    return [[by_index[index]] for index in range(len(TEXTS))]


async def classify(api: AsyncOpenAI) -> Vectors:
    made = await post(api, "/classify", model=CLASSIFIER, input=TEXTS)
    return [one["probs"] for one in made["data"]]


async def everything(api: AsyncOpenAI) -> dict[str, Vectors]:
    """What the pool makes of the texts, all models at once."""
    embeddings = [embed(api, name) for name in (BERT, MODERN_BERT, QWEN3)]
    scores = [rerank(api, name) for name in (RERANKER, QWEN3_RERANKER)]
    calls = (*embeddings, *scores, classify(api))
    return dict(zip(POOLING, await asyncio.gather(*calls), strict=True))


def assert_close(made: dict[str, Vectors], alone: dict[str, Vectors]) -> None:
    for name, vectors in alone.items():
        assert len(made[name]) == len(vectors)
        for one, other in zip(made[name], vectors, strict=True):
            assert one == pytest.approx(other, abs=CLOSE), name


async def test_results_among_answers_equal_those_of_vllm_alone(
    box: PrivateDaemon, api: AsyncOpenAI, alone: dict[str, Vectors]
) -> None:
    undisturbed = {name: await ask(api, name, "a story", NUM_TOKENS) for name in (LLAMA, QWEN2)}
    answers = {name: Background(api, name, "a story", NUM_TOKENS) for name in (LLAMA, QWEN2)}
    for one in answers.values():
        await one.started()
    for _ in range(2):
        assert_close(await everything(api), alone)
    for name, one in answers.items():
        assert await one.finished() == undisturbed[name]
    with box.client() as client:
        assert {LLAMA, QWEN2, *POOLING} <= {switch.model for switch in client.switches(1000)}
    check(box)


async def test_a_killed_worker_loses_no_result(
    box: PrivateDaemon, api: AsyncOpenAI, alone: dict[str, Vectors]
) -> None:
    worker = child(box, "worker")
    worker.suspend()
    made = asyncio.create_task(everything(api))
    num_live = {name: len(TEXTS) for name in POOLING}
    await eventually(lambda: {name: usage(box, name).num_live for name in POOLING} == num_live)
    worker.kill()
    assert_close(await made, alone)
    assert sum(num_resumed(box, name) for name in POOLING) > 0
    await eventually(lambda: {row.state for row in ps(box).models} == {"ready"}, 60)


def num_resumed(daemon: PrivateDaemon, model: str) -> float:
    name = f'gpupool_requests_resumed_total{{model="{model}"}} '
    lines = httpx.get(f"{daemon.http_url}/metrics").text.splitlines()
    [value] = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return float(value)


def test_a_score_of_embeddings_is_their_cosine(http: httpx.Client) -> None:
    body = {"model": BERT, "text_1": "one", "text_2": ["one", "another"]}
    for path in ("/score", "/v1/score"):
        [same, other] = http.post(path, json=body).json()["data"]
        assert same["score"] == pytest.approx(1.0, abs=1e-5)
        assert other["score"] < 0.999
    vectors = http.post("/pooling", json={"model": BERT, "input": ["one", "another"]}).json()
    one, another = (row["data"] for row in vectors["data"])
    cosine = sum(a * b for a, b in zip(one, another, strict=True))
    assert other["score"] == pytest.approx(cosine, abs=1e-5)


def test_token_ids_and_base64_are_understood(http: httpx.Client) -> None:
    words = {"model": QWEN3, "input": ["some words"]}
    ids = http.post("/tokenize", json={"model": QWEN3, "prompt": "some words"}).json()["tokens"]
    plain = http.post("/v1/embeddings", json=words).json()
    by_ids = http.post("/v1/embeddings", json={"model": QWEN3, "input": ids}).json()
    assert by_ids["data"] == plain["data"]
    assert by_ids["usage"]["prompt_tokens"] == len(ids)
    packed = http.post("/v1/embeddings", json=words | {"encoding_format": "base64"}).json()
    assert isinstance(packed["data"][0]["embedding"], str)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"model": LLAMA, "input": "x"}, "does not serve /v1/embeddings"),
        ("/v1/completions", {"model": BERT, "prompt": "x"}, "the model serves /detokenize"),
        ("/rerank", {"model": CLASSIFIER, "query": "x", "documents": ["y"]}, "does not serve"),
        (
            "/v1/embeddings",
            {"model": BERT, "input": ["x"] * 2049},
            "2,049 inputs, more than the 2,048",
        ),
        ("/v1/embeddings", {"model": BERT, "input": [1.5] * 2000}, "`input` must be a text"),
        ("/v1/embeddings", {"model": BERT, "input": "x" * 70_000}, "70,000 characters"),
        ("/v1/embeddings", {"model": BERT, "input": "so " * 300}, "maximum context length"),
        ("/rerank", {"model": RERANKER, "query": "x", "documents": ["y"] * 2050}, "more than"),
        ("/rerank", {"model": RERANKER, "query": "x" * 70_000, "documents": ["y"]}, "characters"),
        ("/v1/embeddings", {"model": BERT, "input": []}, "at least one prompt"),
        ("/v1/embeddings", {"model": BERT, "input": "x", "dimensions": 7}, "Matryoshka"),
    ],
)
def test_wrong_requests_are_told_why(
    http: httpx.Client, path: str, body: dict[str, Any], said: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


async def test_the_official_client_sees_the_refusal(api: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="does not serve"):
        await api.chat.completions.create(
            model=BERT, messages=[{"role": "user", "content": "hello"}]
        )


async def test_a_result_counts_as_a_first_token(box: PrivateDaemon, api: AsyncOpenAI) -> None:
    await embed(api, QWEN3)

    def rows() -> list[Any]:
        with box.client() as client:
            return [row for row in client.requests() if row.model == QWEN3]

    until(lambda: len(rows()) >= len(TEXTS))
    for row in rows():
        assert (row.num_output_tokens, row.num_tokens_in_time) == (1, 1)
        assert row.ttft_s is not None
        assert row.finish_reason == "stop"
    assert usage(box, QWEN3).attainment_1h == 1.0
    shown = cli(box, "show", QWEN3).stdout
    assert "embed" in shown
    assert "decode step" not in shown
    metrics = (await asyncio.to_thread(httpx.get, f"{box.http_url}/metrics")).text
    assert f'gpupool_requests_finished_total{{model="{QWEN3}",reason="stop"}}' in metrics
