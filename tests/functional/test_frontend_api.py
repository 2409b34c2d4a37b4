"""The whole HTTP API through a real frontend process, over real engines (``EnginePeer``)."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks import frontend_peer
from gpupoold.wire.messages import RequestsFailed, ServedModel, StopServing
from tests.functional.engine_peer import (
    MAX_MODEL_LEN,
    EnginePeer,
    added_since,
    until,
    wait_aborted,
)

# vLLM, xgrammar and torch warn about each other; their engines run in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA, QWEN2, QWEN3 = "tiny-llama", "tiny-qwen2", "tiny-qwen3"
FOREVER: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
GREETING: Any = [{"role": "user", "content": "hello there"}]


def served(name: str, **changes: Any) -> ServedModel:
    row: dict[str, Any] = {
        "name": name,
        "aliases": (f"{name}-latest",),
        "state": "ready",
        "created_at": 1_700_000_000.5,
        "max_model_len": MAX_MODEL_LEN,
    }
    return ServedModel(**row | changes)


BROKEN = served("broken", state="failed", reason="no such layer", retry_after_s=7.2)
ALL_MODELS = (served(LLAMA), served(QWEN2), served(QWEN3), BROKEN)


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[EnginePeer]:
    paths = {name: tiny_models[name] for name in (LLAMA, QWEN2, QWEN3)}
    with EnginePeer(paths) as running:
        running.wait_ready()
        for name in paths:
            assert running.serve(name, aliases=(f"{name}-latest",)).error_code == ""
        running.announce(*ALL_MODELS)
        yield running


@pytest.fixture
def api(peer: EnginePeer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{peer.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(peer: EnginePeer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=peer.url, timeout=30) as client:
        yield client


@pytest.fixture
def held_engines(peer: EnginePeer) -> Iterator[EnginePeer]:
    """Engines that do not step, so that requests stay open."""
    peer.hold_steps.set()
    yield peer
    peer.hold_steps.clear()


def complete(api: openai.OpenAI, model: str, prompt: str, max_tokens: int = 24) -> str:
    parts = api.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(part.choices[0].text for part in parts if part.choices)


class TestOwnAnswers:
    def test_models_are_listed_with_their_state(self, http: httpx.Client) -> None:
        rows = {row["id"]: row for row in http.get("/v1/models").json()["data"]}
        assert list(rows) == [LLAMA, QWEN2, QWEN3, "broken"]
        assert rows[LLAMA] == {
            "id": LLAMA,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "gpupool",
            "max_model_len": MAX_MODEL_LEN,
            "status": "ready",
            "aliases": [f"{LLAMA}-latest"],
        }
        assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("failed", "no such layer")

    def test_alias_is_retrievable(self, api: openai.OpenAI) -> None:
        assert api.models.retrieve(f"{QWEN2}-latest").id == QWEN2

    @pytest.mark.parametrize(
        ("path", "status"), [("/health", 200), ("/ready", 200), ("/version", 200)]
    )
    def test_probes(self, http: httpx.Client, path: str, status: int) -> None:
        assert http.get(path).status_code == status

    @pytest.mark.parametrize(
        "path", ["/load", "/ping", "/scale_elastic_ep", "/sleep", "/collective_rpc", "/docs"]
    )
    def test_operator_endpoints_are_out_of_reach(self, http: httpx.Client, path: str) -> None:
        assert http.get(path).status_code == 404
        assert http.post(path, json={"model": LLAMA}).status_code == 404


class TestGeneration:
    def test_chat_stream_equals_whole_answer(self, api: openai.OpenAI) -> None:
        arguments: Any = {"model": LLAMA, "messages": GREETING, "max_tokens": 16, "temperature": 0}
        whole = api.chat.completions.create(**arguments).choices[0].message.content
        parts = api.chat.completions.create(**arguments, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
        assert whole

    def test_alias_answers_as_the_model(self, api: openai.OpenAI) -> None:
        prompt = "def foo(self):"
        assert complete(api, f"{LLAMA}-latest", prompt) == complete(api, LLAMA, prompt)

    @pytest.mark.parametrize("logprobs", [None, 2])
    def test_tokens_that_came_while_it_was_busy_share_a_chunk(
        self, peer: EnginePeer, api: openai.OpenAI, logprobs: int | None
    ) -> None:
        arguments: Any = {"model": LLAMA, "prompt": "once", "max_tokens": 60, "temperature": 0}
        arguments |= {"logprobs": logprobs, "extra_body": {"ignore_eos": True}}
        whole = api.completions.create(**arguments).choices[0]
        start = len(peer.received)
        parts = api.completions.create(**arguments, stream=True)
        [request_id] = added_since(peer, start, LLAMA)
        os.kill(peer.pid, signal.SIGSTOP)
        try:
            until(lambda: request_id not in peer.engines.open_requests(LLAMA))
        finally:
            os.kill(peer.pid, signal.SIGCONT)
        chunks = [part.choices[0] for part in parts]
        assert len(chunks) < 60
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert chunks[-1].finish_reason == whole.finish_reason == "length"
        if logprobs:
            assert whole.logprobs is not None
            tokens = [chunk.logprobs.tokens or [] for chunk in chunks if chunk.logprobs]
            assert list(itertools.chain.from_iterable(tokens)) == whole.logprobs.tokens

    def test_format_without_a_grammar_is_refused(self, api: openai.OpenAI) -> None:
        schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
        with pytest.raises(openai.BadRequestError, match="grammar cannot be used"):
            api.chat.completions.create(
                model=LLAMA, messages=GREETING, max_tokens=4, response_format=schema
            )

    def test_two_samples(self, api: openai.OpenAI) -> None:
        answer = api.completions.create(model=QWEN2, prompt="a b c", n=2, max_tokens=8, seed=3)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16

    def test_stop_string_ends_the_answer(self, api: openai.OpenAI) -> None:
        text = complete(api, LLAMA, "hello", max_tokens=32)
        stop = text[len(text) // 2 :][:3]
        answer = api.completions.create(
            model=LLAMA, prompt="hello", max_tokens=32, temperature=0, stop=[stop]
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text == text[: text.index(stop)]

    def test_log_probabilities(self, api: openai.OpenAI) -> None:
        answer = api.chat.completions.create(
            model=QWEN3, messages=GREETING, max_tokens=5, logprobs=True, top_logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 5

    def test_json_schema(self, api: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
            "required": ["kind", "old"],
            "additionalProperties": False,
        }
        form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
        # An untrained model likes white space; the penalty makes it get to the point.
        answer = api.chat.completions.create(
            model=LLAMA,
            messages=GREETING,
            max_tokens=300,
            temperature=0,
            frequency_penalty=2,
            response_format=form,
        )
        pet = json.loads(answer.choices[0].message.content or "")
        assert pet["kind"] in ("cat", "dog")
        assert isinstance(pet["old"], bool)

    def test_tools_are_accepted(self, api: openai.OpenAI) -> None:
        tool: Any = {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
        answer = api.chat.completions.create(
            model=QWEN2, messages=GREETING, tools=[tool], tool_choice="auto", max_tokens=8
        )
        assert answer.choices[0].message.role == "assistant"

    def test_concurrent_streams_over_three_models(self, api: openai.OpenAI) -> None:
        jobs = [(name, f"prompt {i}:") for i in range(4) for name in (LLAMA, QWEN2, QWEN3)]
        alone = [complete(api, *job) for job in jobs]
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
            together = list(threads.map(lambda job: complete(api, *job), jobs))
        assert together == alone


class TestOtherApis:
    def test_responses(self, api: openai.OpenAI) -> None:
        answer = api.responses.create(model=LLAMA, input="hello", max_output_tokens=8)
        assert answer.model == LLAMA
        events = api.responses.create(model=LLAMA, input="hello", max_output_tokens=8, stream=True)
        assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")

    def test_unknown_response_id(self, api: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="resp_1"):
            api.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError):
            api.responses.cancel("resp_1")

    def test_anthropic_messages(self, http: httpx.Client) -> None:
        body = {"model": QWEN2, "max_tokens": 6, "messages": GREETING}
        answer = http.post("/v1/messages", json=body).json()
        assert (answer["type"], answer["role"]) == ("message", "assistant")
        assert answer["usage"]["output_tokens"] == 6
        count = http.post("/v1/messages/count_tokens", json=body).json()
        assert count["input_tokens"] == answer["usage"]["input_tokens"]

    def test_anthropic_error_shape(self, http: httpx.Client) -> None:
        answer = http.post("/v1/messages", json={"model": "nobody", "messages": GREETING})
        assert answer.status_code == 404
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "not_found_error"

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": "no list", "max_tokens": 4},
            {"messages": GREETING, "max_tokens": "many"},
            {"messages": [], "max_tokens": 4},
            {"messages": GREETING, "max_tokens": 4, "system": 7},
            {"messages": [{"role": "user", "content": "x " * 9999}], "max_tokens": 4},
        ],
    )
    def test_each_refusal_of_messages_has_anthropic_s_form(
        self, http: httpx.Client, path: str, fields: dict[str, Any]
    ) -> None:
        answer = http.post(path, json={"model": QWEN2, **fields})
        if answer.status_code == 200:  # what is no matter for a count of tokens
            assert path.endswith("count_tokens")
            return
        assert answer.status_code == 400, answer.text
        assert answer.json().keys() == {"type", "error"}
        assert answer.json()["type"] == "error"
        assert answer.json()["error"].keys() == {"type", "message"}
        assert answer.json()["error"]["type"] == "invalid_request_error"

    def test_messages_need_a_limit(self, http: httpx.Client) -> None:
        answer = http.post("/v1/messages", json={"model": QWEN2, "messages": GREETING})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "max_tokens" in answer.json()["error"]["message"]

    def test_tokenize_round_trip(self, http: httpx.Client) -> None:
        tokens = http.post("/tokenize", json={"model": QWEN3, "prompt": "hello there"}).json()
        body = {"model": QWEN3, "tokens": tokens["tokens"]}
        assert http.post("/detokenize", json=body).json()["prompt"].endswith("hello there")


class TestRefusals:
    def test_unknown_model(self, api: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            api.completions.create(model="tiny-lama", prompt="x")
        body: Any = caught.value.body
        assert body["code"] == "model_not_found"
        assert (body["type"], body["param"]) == ("NotFoundError", "model")
        assert "`tiny-llama`" in body["message"]

    def test_failed_model(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", json={"model": "broken", "prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "8")
        assert "no such layer" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[1]", b'"text"', b"{}", b'{"model": 3}', b'{"model": null}', b"\xff\xfe{"],
    )
    def test_malformed_bodies(self, http: httpx.Client, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "BadRequestError"

    def test_bad_fields_are_the_models_business(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", json={"model": LLAMA, "prompt": {"a": 1}})
        assert answer.status_code == 400
        assert http.put("/v1/completions", json={"model": LLAMA}).status_code == 405

    def test_body_over_the_limit(self, http: httpx.Client) -> None:
        body = json.dumps({"model": LLAMA, "prompt": "x" * 11_000_000}).encode()
        headers = {"content-type": "application/json"}
        for content in (body, (body[i : i + 65536] for i in range(0, len(body), 65536))):
            answer = http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == 413

    def test_prompt_longer_than_the_model(self, api: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
            api.completions.create(model=LLAMA, prompt="x y " * 2000, max_tokens=1)


class TestEndings:
    def test_leaving_a_stream_aborts_it(self, peer: EnginePeer, api: openai.OpenAI) -> None:
        start = len(peer.received)
        stream = api.completions.create(model=LLAMA, prompt="go on", stream=True, **FOREVER)
        next(iter(stream))
        stream.close()
        wait_aborted(peer, *added_since(peer, start, LLAMA))

    def test_leaving_before_the_answer_aborts_it(self, held_engines: EnginePeer) -> None:
        start = len(held_engines.received)
        body = {"model": QWEN2, "prompt": "go on", "n": 2}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{held_engines.url}/v1/completions", json=body, timeout=0.5)
        wait_aborted(held_engines, *added_since(held_engines, start, QWEN2, 2))

    def test_failed_request_names_the_reason(self, held_engines: EnginePeer) -> None:
        body = {"model": QWEN2, "prompt": "go on", "n": 2}
        answer = self._failing(held_engines, body)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the device is gone"
        assert answer.json()["error"]["code"] == 503

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_a_final_failure_is_not_repeated_by_client_libraries(
        self, held_engines: EnginePeer, path: str
    ) -> None:
        body: dict[str, Any] = {"model": QWEN3, "max_tokens": 9}
        body |= {"prompt": "go on"} if path == "/v1/completions" else {"messages": GREETING}
        code = "request_crashed_worker"
        answer = self._failing(held_engines, body, path, status=422, code=code)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, code)
        with openai.OpenAI(base_url=held_engines.url, api_key="x") as client:
            assert not client._should_retry(answer)  # type: ignore[arg-type]

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_failed_stream_names_the_reason(self, held_engines: EnginePeer, path: str) -> None:
        body: dict[str, Any] = {"model": QWEN3, "stream": True, "max_tokens": 9}
        body |= {"prompt": "go on"} if path == "/v1/completions" else {"messages": GREETING}
        answer = self._failing(held_engines, body, path)
        assert answer.status_code == 200
        assert "the device is gone" in answer.text

    def test_failed_anthropic_stream_ends_with_an_error_event(
        self, held_engines: EnginePeer
    ) -> None:
        body = {"model": QWEN3, "stream": True, "max_tokens": 9, "messages": GREETING}
        answer = self._failing(held_engines, body, "/v1/messages")
        assert answer.text.startswith("event: error")
        event = json.loads(answer.text.partition("data: ")[2])
        assert event == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "the device is gone"},
        }

    def _failing(
        self, peer: EnginePeer, body: dict[str, Any], path: str = "/v1/completions", **kind: Any
    ) -> httpx.Response:
        """The answer to a request of which one sample fails."""
        start = len(peer.received)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            answer = thread.submit(httpx.post, f"{peer.url}{path}", json=body)
            failed, *others = added_since(peer, start, body["model"], body.get("n", 1))
            message = "the device is gone"
            peer.send(RequestsFailed(body["model"], [failed], message, **kind))
            response = answer.result(20)
        wait_aborted(peer, *others)
        return response


class TestMounting:
    def test_model_that_cannot_be_built(self, peer: EnginePeer, api: openai.OpenAI) -> None:
        answer = peer.serve(LLAMA, path="/nonexistent/model")
        assert answer.error_code == "failed"
        assert LLAMA in answer.error_message
        assert complete(api, LLAMA, "still here")

    def test_only_model_needs_no_name(self, peer: EnginePeer, http: httpx.Client) -> None:
        peer.announce(served(QWEN2), ready=False)
        until(lambda: http.get("/ready").status_code == 503)
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        peer.announce(*ALL_MODELS)
        until(lambda: http.get("/ready").status_code == 200)
        assert answer.json()["model"] == QWEN2

    def test_replacing_keeps_open_streams(self, peer: EnginePeer, api: openai.OpenAI) -> None:
        expected = complete(api, QWEN3, "go on", max_tokens=300)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            start = len(peer.received)
            answer = thread.submit(complete, api, QWEN3, "go on", 300)
            added_since(peer, start, QWEN3)
            assert peer.serve(QWEN3, aliases=(f"{QWEN3}-latest",)).error_code == ""
            assert answer.result(30) == expected

    def test_unmounting_ends_streams_with_an_error(
        self, peer: EnginePeer, api: openai.OpenAI, http: httpx.Client
    ) -> None:
        peer.hold_steps.set()
        start = len(peer.received)
        other = api.completions.create(model=LLAMA, prompt="hi", stream=True, max_tokens=4)
        outcome: list[str] = []
        body = {"model": QWEN3, "prompt": "go on", "stream": True}
        reader = threading.Thread(
            target=lambda: outcome.append(httpx.post(f"{peer.url}/v1/completions", json=body).text)
        )
        reader.start()
        open_ids = added_since(peer, start, QWEN3)
        peer.send(StopServing(name=QWEN3))
        reader.join(20)
        assert "no longer served" in outcome[0]
        wait_aborted(peer, *open_ids)
        assert http.post("/v1/completions", json=body).status_code == 503
        peer.hold_steps.clear()
        assert list(other)[-1].choices[0].finish_reason == "length"
        assert peer.serve(QWEN3, aliases=(f"{QWEN3}-latest",)).error_code == ""
        assert complete(api, QWEN3, "back again")


class TestProcess:
    def test_answers_before_the_engine_is_imported_and_ends_with_the_daemon(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(frontend_peer, "FRONTEND", frontend_peer.FRONTEND_ALONE)
        peer = EnginePeer({})
        peer.let_accept()
        try:
            assert httpx.get(f"{peer.url}/health", timeout=20).status_code == 200
            assert httpx.get(f"{peer.url}/ready").status_code == 503
            peer.hang_up()
            assert peer.process.wait(10) == 0
        finally:
            peer.process.kill()
            peer.process.wait()
