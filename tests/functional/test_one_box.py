"""All kinds of models on one device half as large as their weights, by the official client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import AddAdapterRequest, AddPresetRequest
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    MIXTRAL,
    QWEN2,
    QWEN3,
    check,
    emulated_config,
    private_daemon,
    ps,
    until,
    weight_bytes,
)
from tests.functional.images import data_url, encoded, image_part, picture

pytestmark = pytest.mark.slow

VISION, EMBEDDER, RERANKER = "tiny-qwen2.5-vl", "tiny-bert-embed", "tiny-bert-rerank"
THINKER = "thinker"
ADAPTER, PRESET = "poet", "brief"
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "is_warm": {"type": "boolean"}},
    "required": ["city", "is_warm"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": SCHEMA,
        "strict": True,
    },
}
NO_BLANKS: dict[str, int] = {}
# Opens the reasoning in the prompt, as templates of models do that always reason.
THINKING_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% endif -%}
"""


def blanks(checkpoint: Path) -> list[int]:
    """Return the tokens of blanks, which random weights would repeat within JSON."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    texts = ((number, tokenizer.decode([number])) for number in range(tokenizer.get_vocab_size()))
    return [number for number, text in texts if text and not text.strip()]


def with_thinking(source: Path, target: Path) -> Path:
    """Copy a tiny checkpoint, whose last two merged tokens become the marks of reasoning."""
    shutil.copytree(source, target)
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = sorted(vocabulary, key=lambda token: vocabulary[token])[-2:]
    for mark, token in zip(("<think>", "</think>"), last, strict=True):
        number = vocabulary.pop(token)
        mine = next(one for one in tokenizer["model"]["merges"] if "".join(one) == token)
        tokenizer["model"]["merges"].remove(mine)
        like = dict(tokenizer["added_tokens"][-1])
        tokenizer["added_tokens"].append(like | {"id": number, "content": mark})
    tokenizer["added_tokens"].sort(key=lambda one: one["id"])
    file.write_text(json.dumps(tokenizer))
    (target / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return target


@pytest.fixture(scope="module")
def daemon(
    tiny_models: dict[str, Path],
    vision_models: dict[str, Path],
    tiny_pooling_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    project_env: dict[str, str],
) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("one-box")
    paths = {
        LLAMA: tiny_models[LLAMA],
        QWEN2: tiny_models[QWEN2],
        MIXTRAL: tiny_models[MIXTRAL],
        THINKER: with_thinking(tiny_models[QWEN3], folder / THINKER),
        VISION: vision_models[VISION],
        EMBEDDER: tiny_pooling_models[EMBEDDER],
        RERANKER: tiny_pooling_models[RERANKER],
    }
    NO_BLANKS.update({str(number): -100 for number in blanks(paths[LLAMA])})
    device_bytes = sum(map(weight_bytes, paths.values())) // 2
    maker = [sys.executable, "-m", "tests.support.tiny_adapter", str(folder)]
    base = ["--base", str(paths[LLAMA]), "--name", ADAPTER, "--rank", "4"]
    subprocess.run([*maker, *base], check=True, capture_output=True, env=project_env)
    with private_daemon(emulated_config(device_bytes), folder / "daemon") as daemon:
        for name, path in paths.items():
            options = {"dtype": "float32"} if path.name in tiny_pooling_models else LOAD_OPTIONS
            daemon.add_model(name, path, **options)
        with daemon.client() as client:
            adapter = AddAdapterRequest(name=ADAPTER, base=LLAMA, source=str(folder / ADAPTER))
            for progress in client.add_adapter(adapter):
                assert progress.error is None
            client.add_preset(AddPresetRequest(name=PRESET, base=LLAMA, defaults={"max_tokens": 4}))
        yield daemon
        until(lambda: not ps(daemon).requests)
        check(daemon)


@pytest.fixture(scope="module")
def api(daemon: PrivateDaemon) -> Iterator[OpenAI]:
    url = f"{daemon.http_url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
        yield client


def tools(api: OpenAI) -> Any:
    made = api.chat.completions.create(
        model=LLAMA,
        messages=QUESTION,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=200,
        logit_bias=NO_BLANKS,
    )
    [call] = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert arguments["city"] in ("Oslo", "Rome")
    return arguments


def schema(api: OpenAI) -> Any:
    made = api.chat.completions.create(
        model=QWEN2,
        messages=QUESTION,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": SCHEMA},
        },
        temperature=0,
        max_tokens=200,
        logit_bias=NO_BLANKS,
    )
    answer = json.loads(made.choices[0].message.content or "")
    assert set(answer) == {"city", "is_warm"}
    return answer


def reasoning(api: OpenAI) -> Any:
    made = api.chat.completions.create(
        model=THINKER, messages=QUESTION, temperature=0, max_tokens=24
    )
    message = made.choices[0].message
    thought = getattr(message, "reasoning", None)
    assert thought
    assert not message.content
    return thought


def vision(api: OpenAI) -> Any:
    parts: Any = [
        image_part(data_url(encoded(picture(7)))),
        {"type": "text", "text": "What is it?"},
    ]
    made = api.chat.completions.create(
        model=VISION, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=24
    )
    return made.choices[0].message.content


def embeddings(api: OpenAI) -> Any:
    made = api.embeddings.create(model=EMBEDDER, input=["a fish", "a bicycle"])
    first, second = (one.embedding for one in made.data)
    assert first != second
    return [round(value, 4) for value in first]


def rerank(api: OpenAI) -> Any:
    body = {"model": RERANKER, "query": "a fish", "documents": ["a bicycle", "the sea", "a fish"]}
    answer = httpx.post(f"{api.base_url}rerank", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert sorted(one["index"] for one in results) == [0, 1, 2]
    return [one["index"] for one in results]


def completion(api: OpenAI, model: str) -> Any:
    made = api.completions.create(model=model, prompt="The sea is", temperature=0, max_tokens=24)
    return made.choices[0].text


def adapter(api: OpenAI) -> Any:
    return completion(api, ADAPTER)


def base(api: OpenAI) -> Any:
    return completion(api, LLAMA)


def experts(api: OpenAI) -> Any:
    return completion(api, MIXTRAL)


KINDS = (tools, schema, reasoning, vision, embeddings, rerank, experts, adapter, base)


def test_every_kind_of_request_at_once_is_answered_as_alone(
    daemon: PrivateDaemon, api: OpenAI
) -> None:
    alone = [kind(api) for kind in KINDS]
    assert alone[-1] != alone[-2]  # the adapter changes the answer
    with ThreadPoolExecutor(len(KINDS) * 2) as pool:
        futures = [pool.submit(kind, api) for _ in range(2) for kind in KINDS]
        assert [future.result() for future in futures] == alone * 2
    with daemon.client() as client:
        assert {one.model for one in client.switches(1000) if one.weight_bytes} == {
            LLAMA,
            QWEN2,
            MIXTRAL,
            THINKER,
            VISION,
            EMBEDDER,
            RERANKER,
        }


def test_clients_see_every_name(daemon: PrivateDaemon, api: OpenAI) -> None:
    parents = {one.id: (one.model_extra or {}).get("parent") for one in api.models.list()}
    assert parents == {
        LLAMA: None,
        QWEN2: None,
        MIXTRAL: None,
        THINKER: None,
        VISION: None,
        EMBEDDER: None,
        RERANKER: None,
        ADAPTER: LLAMA,
        PRESET: LLAMA,
    }
    made = api.completions.create(model=PRESET, prompt="The sea is")
    assert made.usage is not None
    assert made.usage.completion_tokens == 4
