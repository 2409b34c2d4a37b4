"""Large answers: the same as small ones, within their bounds, beside another client's stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    Background,
    api_client,
    ask,
    emulated_config,
    private_daemon,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDER = "tiny-bert-embed"
MESSAGE = {"role": "user", "content": "hello"}
GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPT = list(range(100, 400))


@pytest.fixture(scope="module")
def box(
    tiny_models: dict[str, Path],
    tiny_pooling_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("answers")
    with private_daemon(emulated_config(256 << 20), folder) as daemon:
        daemon.add_model(LLAMA, tiny_models[LLAMA], max_model_len=1024, dtype="float32")
        daemon.add_model(EMBEDDER, tiny_pooling_models[EMBEDDER])
        yield daemon


def post(box: PrivateDaemon, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(box.http_url + path, json={"model": LLAMA} | fields, timeout=120)


def test_logprobs_of_a_long_prompt_are_those_of_its_beginning(box: PrivateDaemon) -> None:
    common: dict[str, Any] = {"prompt_logprobs": 20, "max_tokens": 1, **GREEDY}
    whole = post(box, COMPLETIONS, prompt=PROMPT, **common)
    assert whole.status_code == 200, whole.text[:300]
    assert "content-length" not in whole.headers  # in pieces
    part = post(box, COMPLETIONS, prompt=PROMPT[:30], **common)
    assert "content-length" in part.headers
    found, expected = (answer.json()["choices"][0]["prompt_logprobs"] for answer in (whole, part))
    assert len(found) == len(PROMPT)
    for one, other in zip(found[1:30], expected[1:], strict=True):
        assert {key: entry["decoded_token"] for key, entry in one.items()} == {
            key: entry["decoded_token"] for key, entry in other.items()
        }
        for key, entry in one.items():
            assert entry["logprob"] == pytest.approx(other[key]["logprob"], abs=1e-3)


def test_logprobs_of_a_long_answer_are_those_of_its_stream(box: PrivateDaemon) -> None:
    fields = {"prompt": "hello", "max_tokens": 200, "logprobs": 10, **GREEDY}
    whole = post(box, COMPLETIONS, **fields)
    [choice] = whole.json()["choices"]
    tokens: list[str] = []
    top: list[dict[str, float]] = []
    for line in post(box, COMPLETIONS, stream=True, **fields).text.splitlines():
        if line.startswith("data: {"):
            [part] = json.loads(line[6:])["choices"]
            tokens += part["logprobs"]["tokens"]
            top += part["logprobs"]["top_logprobs"]
    assert choice["logprobs"]["tokens"] == tokens
    assert [list(one) for one in choice["logprobs"]["top_logprobs"]] == [list(one) for one in top]
    assert len(tokens) == len(choice["logprobs"]["text_offset"]) == 200


def test_each_sample_of_a_chat_has_its_logprobs(box: PrivateDaemon) -> None:
    fields = {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 20, "n": 3}
    answer = post(box, CHAT, max_tokens=100, ignore_eos=True, **fields)
    assert answer.status_code == 200, answer.text[:300]
    for choice in answer.json()["choices"]:
        content = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in content[:5])
        assert [len(one["top_logprobs"]) for one in content] == [20] * 100
        assert content[0]["bytes"] == list(content[0]["token"].encode())


@pytest.mark.parametrize("num_tokens", [2, 100])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 20}),
        (COMPLETIONS, {"prompt": "hello", "logprobs": 20}),
    ],
)
def test_what_may_not_be_null_is_left_out(
    box: PrivateDaemon, path: str, fields: dict[str, Any], num_tokens: int
) -> None:
    answer = post(box, path, max_tokens=num_tokens, ignore_eos=True, **fields).json()
    [choice] = answer["choices"]
    objects = (answer, answer["usage"], choice, choice.get("message", {}))
    nulls = {name for one in objects for name, value in one.items() if value is None}
    assert not nulls & {
        *("annotations", "function_call", "service_tier"),
        *("completion_tokens_details", "prompt_tokens_details"),
    }
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_an_answer_without_a_limit_ends_at_the_bound(box: PrivateDaemon) -> None:
    fields = {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 20, "n": 64}
    answer = post(box, CHAT, ignore_eos=True, **fields).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 64 * (100_000 // (64 * 21))


def test_a_neighbour_streams_on(box: PrivateDaemon) -> None:
    """Its answer is the same, and goes on before the large answers are whole."""

    async def run() -> None:
        async with api_client(box.http_url) as api, httpx.AsyncClient(timeout=120) as http:
            alone = await ask(api, LLAMA, "somebody else", 200)
            stream = Background(api, LLAMA, "somebody else", 200)
            await stream.started()
            body: dict[str, Any] = {"model": LLAMA, "prompt": [[7 + n, *PROMPT] for n in range(8)]}
            body |= {"prompt_logprobs": 20, "max_tokens": 1}
            answers = await asyncio.gather(
                *(http.post(box.http_url + COMPLETIONS, json=body) for _ in range(2))
            )
            assert {answer.status_code for answer in answers} == {200}
            assert await stream.finished() == alone

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["float", pytest.param("base64", marks=pytest.mark.slow)])
def test_as_many_inputs_as_openai_takes(box: PrivateDaemon, encoding: str) -> None:
    inputs = [f"text {number}" for number in range(2_048)]
    fields = {"model": EMBEDDER, "encoding_format": encoding}
    answer = post(box, "/v1/embeddings", input=inputs, **fields)
    assert answer.status_code == 200, answer.text[:300]
    rows = answer.json()["data"]
    assert [row["index"] for row in rows] == [*range(2_048)]
    [alone] = post(box, "/v1/embeddings", input=inputs[2_047], **fields).json()["data"]
    if encoding == "float":
        assert rows[-1]["embedding"] == pytest.approx(alone["embedding"], abs=1e-4)
    assert len(rows[-1]["embedding"]) == len(alone["embedding"])
    beyond = post(box, "/v1/embeddings", input=[*inputs, "x"], **fields)
    assert beyond.status_code == 400
    assert "2,049 inputs, more than the 2,048" in beyond.text


def test_a_thousand_inputs_of_token_ids(box: PrivateDaemon) -> None:
    """As LangChain sends texts."""
    inputs = [[5 + number % 90] * 60 for number in range(1_000)]
    answer = post(box, "/v1/embeddings", model=EMBEDDER, input=inputs)
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["usage"]["prompt_tokens"] == 60_000
    [alone] = post(box, "/v1/embeddings", model=EMBEDDER, input=inputs[999]).json()["data"]
    assert answer.json()["data"][999]["embedding"] == pytest.approx(alone["embedding"], abs=1e-4)


def test_one_text_beyond_the_model_s_context_is_refused_by_the_model(box: PrivateDaemon) -> None:
    answer = post(box, "/v1/embeddings", model=EMBEDDER, input=[5] * 8_192)
    assert answer.status_code == 400
    assert "elements" not in answer.text
    assert "context" in answer.text or "maximum" in answer.text


@pytest.mark.slow
def test_documents_to_rank(box: PrivateDaemon) -> None:
    documents = [f"text {number}" for number in range(2_048)]
    answer = post(box, "/v1/rerank", model=EMBEDDER, query="text 7", documents=documents)
    assert answer.status_code == 200, answer.text[:300]
    assert sorted(row["index"] for row in answer.json()["results"]) == [*range(2_048)]


def test_many_tokens_of_a_text(box: PrivateDaemon) -> None:
    answer = post(box, "/tokenize", prompt="hello " * 5_000, return_token_strs=True)
    assert answer.status_code == 200, answer.text[:300]
    body = answer.json()
    assert len(body["tokens"]) == len(body["token_strs"]) == body["count"] > 5_000
