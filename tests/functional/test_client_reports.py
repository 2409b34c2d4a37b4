"""What users of other servers reported as broken, tried here: names, streams, texts, history."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import LLAMA, LOAD_OPTIONS, cli

HELLO = [{"role": "user", "content": "hello there"}]
ALIAS = "org/name:v1"


@pytest.fixture
def alias(pool: PrivateDaemon) -> Iterator[str]:
    assert cli(pool, "set", LLAMA, "--add-alias", ALIAS).returncode == 0
    yield ALIAS
    assert cli(pool, "set", LLAMA, "--remove-alias", ALIAS).returncode == 0


def post(http: httpx.Client, path: str, **fields: Any) -> Any:
    """Return the answer to a request of ``LLAMA`` that must succeed."""
    answer = http.post(path, json={"model": LLAMA} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(http: httpx.Client, path: str, **fields: Any) -> list[Any]:
    """Return the chunks of a stream of ``LLAMA``."""
    text = http.post(path, json={"model": LLAMA, "stream": True} | fields).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", text
    return [json.loads(one) for one in data[:-1]]


class TestNames:
    """ollama#10139, #13715, litellm#37275, vllm#7260."""

    @pytest.mark.usefixtures("alias")
    @pytest.mark.parametrize("path", ["org/name:v1", "org%2Fname%3Av1", "org/name%3av1"])
    def test_a_name_with_separators_is_found(self, http: httpx.Client, path: str) -> None:
        answer = http.get(f"/v1/models/{path}")
        assert (answer.status_code, answer.json()["id"]) == (200, LLAMA)

    def test_an_answer_has_the_name_that_was_asked(self, http: httpx.Client, alias: str) -> None:
        for path, fields in (
            ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
            ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
            ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
        ):
            assert post(http, path, model=alias, **fields)["model"] == alias


class TestStreams:
    @pytest.mark.parametrize("is_kept", [False, True], ids=["cut", "kept"])
    def test_a_stop_string_of_several_chunks(self, http: httpx.Client, is_kept: bool) -> None:
        """vllm#3574, #2577: nothing of the string leaks, or all of it is there."""
        asked: dict[str, Any] = {"prompt": "hello", "max_tokens": 32, "temperature": 0}
        text = post(http, "/v1/completions", **asked)["choices"][0]["text"]
        middle = len(text) // 2
        stop = text[middle : middle + 12]
        parts = chunks(
            http, "/v1/completions", **asked, stop=[stop], include_stop_str_in_output=is_kept
        )
        streamed = "".join(part["choices"][0]["text"] for part in parts)
        end = text.index(stop)
        assert streamed == text[: end + len(stop) * is_kept]
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"

    def test_usage_of_samples_comes_once(self, http: httpx.Client) -> None:
        """ollama#4448, vllm#7179."""
        parts = chunks(
            http,
            "/v1/chat/completions",
            messages=HELLO,
            max_tokens=6,
            n=2,
            ignore_eos=True,
            stream_options={"include_usage": True},
        )
        *others, last = parts
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert all(part.get("usage") is None for part in others)
        answer = http.post(
            "/v1/chat/completions",
            json={"model": LLAMA, "messages": HELLO, "stream_options": {"include_usage": True}},
        )
        assert answer.status_code == 400
        assert "stream_options" in answer.json()["error"]["message"]

    @pytest.mark.parametrize("text", ["héé 日本語 😀", "👩‍👩‍👧 naïve ß", "한국어 текст"])
    def test_characters_of_several_tokens(self, http: httpx.Client, text: str) -> None:
        """exo#1691, cog-llama-template#75: a stream has whole characters."""
        asked = {"messages": HELLO, "max_tokens": 80, "structured_outputs": {"choice": [text]}}
        whole = post(http, "/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
        parts = chunks(http, "/v1/chat/completions", **asked)
        pieces = [part["choices"][0]["delta"].get("content") or "" for part in parts]
        assert "".join(pieces) == whole == text
        assert not any("\ufffd" in piece for piece in pieces)

    def test_offsets_of_an_echo(self, http: httpx.Client) -> None:
        """vllm#47815, #6521."""
        asked = {"prompt": "a b c", "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 1}
        whole = post(http, "/v1/completions", **asked)["choices"][0]["logprobs"]
        parts = [
            part["choices"][0]["logprobs"] for part in chunks(http, "/v1/completions", **asked)
        ]
        for field in ("tokens", "text_offset"):
            assert [item for part in parts if part for item in part[field]] == whole[field]

    def test_no_token_with_an_echo(self, http: httpx.Client) -> None:
        """vllm#9336."""
        answer = post(http, "/v1/completions", prompt="a b c", max_tokens=0, echo=True)
        assert answer["choices"][0]["text"] == "a b c"


SCHEMAS: dict[str, Any] = {
    "long-text": {"type": "string", "maxLength": 20000},
    "reference": {
        "$defs": {"pet": {"enum": ["cat", "dog"]}},
        "type": "object",
        "properties": {"pet": {"$ref": "#/$defs/pet"}},
        "required": ["pet"],
        "additionalProperties": False,
    },
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "unicode-enumeration": {"enum": ["žluťoučký", "日本", "😀"]},
}


class TestInput:
    @pytest.mark.parametrize("case", SCHEMAS)
    def test_a_schema_is_accepted(self, http: httpx.Client, case: str) -> None:
        """llama.cpp#26596, vllm#15762, #54003."""
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMAS[case]}}
        answer = post(
            http, "/v1/chat/completions", messages=HELLO, max_tokens=20, response_format=form
        )
        assert answer["usage"]["completion_tokens"] > 0

    @pytest.mark.parametrize("arguments", ["", '{"a":', "null"])
    def test_broken_arguments_of_an_earlier_call(self, http: httpx.Client, arguments: str) -> None:
        """vllm#19419, #48922."""
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        history: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        assert post(http, "/v1/chat/completions", messages=history, max_tokens=2)["choices"]
        items: list[Any] = [
            *HELLO,
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": arguments,
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ]
        assert post(http, "/v1/responses", input=items, max_output_tokens=2)["output"]

    def test_an_earlier_response_is_not_kept(self, http: httpx.Client) -> None:
        """mlx-vlm#1046, litellm#26147: an unknown id is an error, not ignored."""
        body = {"model": LLAMA, "input": "x", "previous_response_id": "resp_x"}
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 404
        assert "resp_x" in answer.json()["error"]["message"]

    def test_an_image_of_a_tool_for_a_model_of_text(self, http: httpx.Client) -> None:
        """command-code#850: refused in the form of the API, with the reason."""
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        result = {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "image", "source": source}],
        }
        use = {"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}}
        history = [
            *HELLO,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        body = {"model": LLAMA, "max_tokens": 2, "messages": history}
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "multimodal" in answer.json()["error"]["message"]

    def test_a_priority_means_nothing(self, http: httpx.Client) -> None:
        """vLLM's field; the order here follows from targets and the key's priority."""
        asked = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        plain = post(http, "/v1/completions", **asked)["choices"][0]["text"]
        assert post(http, "/v1/completions", **asked, priority=-5)["choices"][0]["text"] == plain


class TestCheckpoints:
    @pytest.fixture
    def folder(self, tiny_models: dict[str, Path], tmp_path: Path) -> Path:
        """A checkpoint without a chat template, under a path with a space."""
        folder = tmp_path / "my models" / "plain"
        without = shutil.ignore_patterns("chat_template.jinja")
        shutil.copytree(tiny_models[LLAMA], folder, ignore=without)
        return folder

    def test_weights_that_change_on_disk(
        self, pool: PrivateDaemon, http: httpx.Client, folder: Path
    ) -> None:
        """vllm#32718, #54235: after an unload the new weights answer, without old KV."""
        pool.add_model("plain", folder, **LOAD_OPTIONS)
        try:
            asked = {"model": "plain", "prompt": "a b c " * 20, "max_tokens": 16, "temperature": 0}
            first = http.post("/v1/completions", json=asked)
            again = http.post("/v1/completions", json=asked)
            assert again.json()["choices"] == first.json()["choices"]
            assert int(again.headers["x-gpupool-cached-tokens"]) > 0
            file = folder / "model.safetensors"
            tensors = {name: tensor.roll(1, 0) for name, tensor in load_file(file).items()}
            save_file(tensors, file, {"format": "pt"})
            assert cli(pool, "unload", "plain").returncode == 0
            changed = http.post("/v1/completions", json=asked)
            assert changed.headers["x-gpupool-cached-tokens"] == "0"
            assert changed.json()["choices"] != first.json()["choices"]
            chat = http.post("/v1/chat/completions", json={"model": "plain", "messages": HELLO})
            assert chat.status_code == 400
            assert "template" in chat.json()["error"]["message"]
        finally:
            assert cli(pool, "rm", "plain").returncode == 0
