"""The HTTP API through the whole daemon: one of each kind of request, and bad input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    MAX_LEN,
    MIXTRAL,
    MODELS,
    QWEN2,
    QWEN3,
    Answer,
    Background,
    admin_http,
    ask,
    cli,
)

GREETING: Any = [{"role": "user", "content": "hello there"}]
JSON = {"content-type": "application/json"}


class TestGeneration:
    async def test_stream_equals_whole_answer(self, api: AsyncOpenAI) -> None:
        arguments: Any = {"model": LLAMA, "messages": GREETING, "max_tokens": 16, "temperature": 0}
        whole = (await api.chat.completions.create(**arguments)).choices[0].message.content
        parts = await api.chat.completions.create(**arguments, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in parts]) == whole
        assert whole

    async def test_usage_at_the_end_of_a_stream(self, api: AsyncOpenAI) -> None:
        parts = await api.completions.create(
            model=QWEN3,
            prompt="a b c",
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *_, last = [part async for part in parts]
        assert last.usage is not None
        assert last.usage.completion_tokens == 7

    async def test_two_samples(self, api: AsyncOpenAI) -> None:
        answer = await api.completions.create(
            model=QWEN2, prompt="a b c", n=2, max_tokens=8, seed=3, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16

    async def test_stop_string(self, api: AsyncOpenAI) -> None:
        text = (await ask(api, MIXTRAL, "hello", 32)).text
        stop = text[len(text) // 2 :][:3]
        answer = await api.completions.create(
            model=MIXTRAL, prompt="hello", max_tokens=32, temperature=0, stop=[stop]
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text == text[: text.index(stop)]

    async def test_log_probabilities(self, api: AsyncOpenAI) -> None:
        answer = await api.chat.completions.create(
            model=QWEN3, messages=GREETING, max_tokens=5, logprobs=True, top_logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 5

    async def test_json_schema(self, api: AsyncOpenAI) -> None:
        kinds = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}}
        schema = kinds | {"required": ["kind"], "additionalProperties": False}
        # An untrained model likes white space; the penalty makes it get to the point.
        answer = await api.chat.completions.create(
            model=LLAMA,
            messages=GREETING,
            max_tokens=300,
            temperature=0,
            frequency_penalty=2,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "pet", "schema": schema},
            },
        )
        assert json.loads(answer.choices[0].message.content or "")["kind"] in ("cat", "dog")

    async def test_tools(self, api: AsyncOpenAI) -> None:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
        tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        answer = await api.chat.completions.create(
            model=QWEN2, messages=GREETING, tools=[tool], tool_choice="auto", max_tokens=8
        )
        assert answer.choices[0].message.role == "assistant"

    async def test_one_request_id_for_several_requests(self, pool: PrivateDaemon) -> None:
        """Clients may send ``X-Request-Id``, and may send the same one twice at a time."""
        body = {"model": LLAMA, "prompt": "hello", "max_tokens": 40, "temperature": 0}
        async with httpx.AsyncClient(base_url=pool.http_url, timeout=30) as http:
            posts = [
                http.post("/v1/completions", json=body, headers={"x-request-id": "same"})
                for _ in range(4)
            ]
            answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1


class TestNames:
    def test_every_model_is_listed(self, http: httpx.Client) -> None:
        rows = http.get("/v1/models").json()["data"]
        assert [(row["id"], row["status"]) for row in rows] == [(name, "ready") for name in MODELS]
        assert http.get(f"/v1/models/{LLAMA}").json()["max_model_len"] == MAX_LEN
        assert http.get("/ready").json() == {"ready": True}

    async def test_an_alias_answers_as_its_model(
        self, pool: PrivateDaemon, api: AsyncOpenAI
    ) -> None:
        expected = await ask(api, QWEN3, "def foo(self):")
        assert cli(pool, "set", QWEN3, "--add-alias", "org/name:v1").returncode == 0
        try:
            assert await ask(api, "org/name:v1", "def foo(self):") == expected
        finally:
            assert cli(pool, "set", QWEN3, "--remove-alias", "org/name:v1").returncode == 0
        with pytest.raises(openai.NotFoundError):
            await ask(api, "org/name:v1", "def foo(self):")


def completion(**fields: Any) -> bytes:
    body = {"model": LLAMA, "prompt": "x", "max_tokens": 2}
    return json.dumps({name: value for name, value in (body | fields).items() if value}).encode()


# What a body is, and the status and part of the message that it must be answered with.
BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "JSON"),
    "malformed": (b'{"model": "tiny-llama",', 400, "JSON"),
    "not-unicode": (b"\xff\xfe{}", 400, "JSON"),
    "a-list": (b"[1, 2]", 400, "object"),
    "no-model": (completion(model=None), 400, "model"),
    "model-is-a-number": (completion(model=7), 400, "model"),
    "unknown-model": (completion(model="tiny-lama"), 404, "`tiny-llama`"),
    "no-prompt": (completion(prompt=None), 400, "prompt"),
    "prompt-of-another-type": (completion(prompt={"a": 1}), 400, "prompt"),
    "prompt-too-long": (completion(prompt="x y " * 4000), 400, str(MAX_LEN)),
    "answer-too-long": (completion(max_tokens=MAX_LEN + 1), 400, str(MAX_LEN)),
    "max-tokens-is-text": (completion(max_tokens="many"), 400, "max_tokens"),
    "token-out-of-vocabulary": (completion(prompt=[99999]), 400, "vocabulary"),
    "temperature-is-text": (completion(temperature="hot"), 400, "temperature"),
    "too-many-log-probabilities": (completion(logprobs=1000), 400, "logprobs"),
    "bad-regex": (completion(structured_outputs={"regex": "((("}), 400, "rammar"),
}


def raw(pool: PrivateDaemon, *pieces: bytes) -> bytes:
    """Send pieces on one connection; return all that comes until the server closes."""
    port = int(pool.http_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05)  # pieces arrive as segments of their own
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                found += piece
    return found


def post(body: bytes, *lines: str, version: str = "1.1") -> list[bytes]:
    """Head and body of a completion."""
    head = [f"POST /v1/completions HTTP/{version}", "Host: localhost", *lines]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ["\r\n".join([*head, "", ""]).encode(), body]


class TestFormsOfHttp:
    """The same as tests/unit/system/test_http_protocol.py, with the event loop of a frontend."""

    H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")

    def test_the_body_of_a_java_client(self, pool: PrivateDaemon) -> None:
        last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answers = raw(pool, *post(completion(), *self.H2C), last)
        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert b'"text_completion"' in answers

    def test_a_body_is_no_second_request(self, pool: PrivateDaemon) -> None:
        smuggled = b"GET /v1/models/SMUGGLED HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answers = raw(pool, *post(smuggled, *self.H2C, "Connection: close"))
        assert answers.count(b"HTTP/1.1 ") == 1
        assert b"SMUGGLED" not in answers

    def test_trailers(self, pool: PrivateDaemon) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        chunk = b"%x\r\n%s\r\n" % (len(completion()), completion())
        answers = raw(pool, head + b"\r\n" + chunk, b"0\r\nHost: evil\r\n\r\n")
        assert answers.startswith(b"HTTP/1.1 400 ")
        assert b"trailers" in answers

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_old_client_gets_no_chunks(self, pool: PrivateDaemon, stream: bool) -> None:
        body = completion(stream=stream)
        answer = raw(pool, *post(body, "Connection: keep-alive", version="1.0"))
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"transfer-encoding" not in head.lower()
        end = b"data: [DONE]\n\n" if stream else b"}"
        assert content.endswith(end)
        assert content.startswith((b"data: ", b": gpupool ") if stream else b"{")

    @pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("evil", 421)])
    def test_an_absolute_uri(self, pool: PrivateDaemon, host: str, status: int) -> None:
        asked = f"GET http://{host}/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close"
        assert raw(pool, f"{asked}\r\n\r\n".encode()).startswith(b"HTTP/1.1 %d " % status)

    def test_a_byte_order_mark(self, pool: PrivateDaemon, http: httpx.Client) -> None:
        body = b"\xef\xbb\xbf" + completion()
        assert http.post("/v1/completions/", content=body, headers=JSON).status_code == 200
        with admin_http(pool) as admin:
            asked = b'\xef\xbb\xbf{"ttft_s": -7}'
            answer = admin.patch(f"/models/{LLAMA}", content=asked, headers=JSON)
        assert "ttft_s" in answer.json()["error"]["message"]

    def test_a_compressed_body(self, pool: PrivateDaemon, http: httpx.Client) -> None:
        headers = JSON | {"content-encoding": "zstd"}
        with admin_http(pool) as admin:
            answers = [
                http.post("/v1/completions", content=b"x", headers=headers),
                admin.post("/models", content=b"x", headers=headers),
            ]
        assert [answer.status_code for answer in answers] == [415, 415]
        assert all("zstd" in answer.json()["error"]["message"] for answer in answers)

    def test_background_names_nothing_of_the_engine(self, http: httpx.Client) -> None:
        body = {"model": LLAMA, "input": "x", "background": True}
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert "VLLM" not in answer.text
        assert "background" in answer.json()["error"]["message"]


class TestBadInput:
    @pytest.fixture(scope="class")
    def undisturbed(self) -> list[Answer]:
        """The background stream's answer when nothing else runs, once somebody has asked."""
        return []

    @pytest.fixture
    async def background(self, api: AsyncOpenAI, undisturbed: list[Answer]) -> AsyncIterator[None]:
        """While the test runs so does a stream on the same model, and it must not notice."""
        if not undisturbed:
            undisturbed.append(await ask(api, LLAMA, "go on", 60))
        stream = Background(api, LLAMA, "go on", 60)
        await stream.started()
        yield
        assert await stream.finished() == undisturbed[0]

    @pytest.mark.usefixtures("background")
    @pytest.mark.parametrize("case", BAD_BODIES)
    async def test_is_answered_with_the_reason(self, pool: PrivateDaemon, case: str) -> None:
        content, status, words = BAD_BODIES[case]
        async with httpx.AsyncClient(base_url=pool.http_url, timeout=30) as http:
            answer = await http.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error.keys() >= {"message", "type", "param", "code"}
        assert error["code"] == ("model_not_found" if status == 404 else status)
        assert words in error["message"]

    @pytest.mark.usefixtures("background")
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_body_over_the_limit(self, pool: PrivateDaemon, chunked: bool) -> None:
        body = completion(prompt="x" * 11_000_000)

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]

        content = chunks() if chunked else body
        async with httpx.AsyncClient(base_url=pool.http_url, timeout=30) as http:
            answer = await http.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == 413

    def test_unknown_fields_are_tolerated(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", content=completion(frobnicate=1), headers=JSON)
        assert answer.status_code == 200

    def test_the_openai_client_sees_its_own_errors(self, pool: PrivateDaemon) -> None:
        url = f"{pool.http_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="nobody", prompt="x")
            with pytest.raises(openai.BadRequestError, match=str(MAX_LEN)):
                client.completions.create(model=LLAMA, prompt="x y " * 4000)
            with pytest.raises(openai.BadRequestError, match="message"):
                client.chat.completions.create(model=LLAMA, messages=[])
