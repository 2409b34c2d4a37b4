"""Grammars that end or hold up whoever compiles them, sent to a real frontend during a stream."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from gpupoold.domain import ModelName
from gpupoold.frontend.grammars import GrammarVerdict, GrammarVetting
from gpupoold.wire.messages import ModelToLoad, ServedModel
from tests.functional.engine_peer import EnginePeer, until

# vLLM, xgrammar and torch warn about each other; their engines run in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = "tiny-llama"
MESSAGES = [{"role": "user", "content": "hello"}]
STREAM: dict[str, Any] = {
    "model": LLAMA,
    "prompt": "hello",
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
}
DEEP = "(" * 30_000 + "a" + ")" * 30_000
QUADRATIC = "(?:a" * 8_000 + ")" * 8_000


def by_response_format(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": MESSAGES, "response_format": form}


def by_tool(schema: Any, choice: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    tools = [{"type": "function", "function": function}]
    return {"messages": MESSAGES, "tools": tools, "tool_choice": choice}


def by_structural_tag(schema: Any) -> dict[str, Any]:
    tag = {"type": "json_schema", "json_schema": schema}
    return {"messages": MESSAGES, "response_format": {"type": "structural_tag", "format": tag}}


CHAT = "/v1/chat/completions"
_NAMED = {"type": "function", "function": {"name": "f"}}
# Every way in for a schema: the path, and a body around the schema.
WAYS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "response_format": (CHAT, by_response_format),
    "structural_tag": (CHAT, by_structural_tag),
    "tools-auto": (CHAT, lambda schema: by_tool(schema, "auto")),
    "tools-required": (CHAT, lambda schema: by_tool(schema, "required")),
    "tools-named": (CHAT, lambda schema: by_tool(schema, _NAMED)),
    "batch": (
        f"{CHAT}/batch",
        lambda schema: by_response_format(schema) | {"messages": [MESSAGES, MESSAGES]},
    ),
    "completions": (
        "/v1/completions",
        lambda schema: {"prompt": "hello", "structured_outputs": {"json": schema}},
    ),
    "completions-text": (
        "/v1/completions",
        lambda schema: {"prompt": "hello", "structured_outputs": {"json": json.dumps(schema)}},
    ),
    "responses": (
        "/v1/responses",
        lambda schema: {
            "input": "hello",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        },
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {
            "messages": MESSAGES,
            "max_tokens": 4,
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
    ),
}
# Grammars that are over a bound.
HUGE: dict[str, dict[str, Any]] = {
    "quadratic": {"json": {"type": "string", "pattern": QUADRATIC}},
    "pattern-properties": {"json": {"type": "object", "patternProperties": {DEEP: {}}}},
    "regex": {"regex": DEEP},
    "100,000-properties": {
        "json": {"type": "object", "properties": {f"p{number}": {} for number in range(100_000)}}
    },
    "deep-json": {"json": json.loads('{"items":' * 100 + "{}" + "}" * 100)},
    "deep-text": {"json": '{"items":' * 100_000 + "{}" + "}" * 100_000},
    "ebnf": {"grammar": 'root ::= "' + "a" * 100_000 + '"'},
    "choices": {"choice": [str(number) for number in range(20_000)]},
    "long-choice": {"choice": ["a" * 300_000]},
    "tag": {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": DEEP}})},
}
FIELDS = ("structured_outputs", "The request body ")
COSTLY = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string"} for number in range(4_900)},
}
# Grammars within the bounds that cannot be compiled.
USELESS: dict[str, tuple[dict[str, Any], str]] = {
    "nested-ebnf": ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, ""),
    "no-answer": ({"json": {"$ref": "#"}}, "no answer matches the grammar"),
    "no-regex": ({"regex": "((("}, ""),
    "no-tag": ({"structural_tag": '{"format": {"type": "nope"}}'}, ""),
}


class Neighbour:
    """Somebody who streams the same greedy answer again and again while others are hostile."""

    def __init__(self, peer: EnginePeer) -> None:
        self._peer = peer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._wanted = self._answer()
        self.num_answers = 0
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        until(lambda: self.failure is not None or self.num_answers > 0)
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                assert self._answer() == self._wanted
                self.num_answers += 1
        except BaseException as error:
            self.failure = error

    def _answer(self) -> str:
        body, url = {**STREAM, "stream": True}, f"{self._peer.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        parts = [json.loads(line) for line in lines]
        return "".join(part["choices"][0]["text"] for part in parts if part["choices"])


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[EnginePeer]:
    with EnginePeer({LLAMA: tiny_models[LLAMA]}) as running:
        running.wait_ready()
        assert running.serve(LLAMA).error_code == ""
        running.announce(ServedModel(name=LLAMA, aliases=(), state="ready", created_at=0.0))
        yield running


@pytest.fixture
def neighbour(peer: EnginePeer) -> Iterator[Neighbour]:
    """The neighbour's streams go on undisturbed, and the frontend runs on."""
    with Neighbour(peer) as running:
        yield running
    assert running.failure is None, running.failure
    assert running.num_answers
    assert peer.process.poll() is None


def post(peer: EnginePeer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(peer.url + path, json={"model": LLAMA, "max_tokens": 4} | body, timeout=120)


def complete(peer: EnginePeer, structured: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"prompt": "hello", "temperature": 0, "structured_outputs": structured}
    return post(peer, "/v1/completions", body | more)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_deep_pattern(peer: EnginePeer, stream: bool) -> None:
    for way, (path, body) in WAYS.items():
        if way == "batch" and stream:
            continue  # it cannot be streamed
        answer = post(peer, path, body({"type": "string", "pattern": DEEP}) | {"stream": stream})
        assert answer.status_code == 400, (way, answer.text)
        message = answer.json()["error"]["message"]
        assert "pattern` is 60001 characters long; the bound is 8192" in message, way


@pytest.mark.usefixtures("neighbour")
def test_over_a_bound(peer: EnginePeer) -> None:
    for name, structured in HUGE.items():
        answer = complete(peer, structured)
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        # Without the field's name where JSON has more values than any request may have.
        assert (error["param"] or error["message"]).startswith(FIELDS), (name, error)


@pytest.mark.usefixtures("neighbour")
def test_many_tools(peer: EnginePeer) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(2_000)]
    answer = post(peer, CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400, answer.text
    assert "`tools` has 2000 entries; the bound is 512" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("neighbour")
def test_within_bounds_but_useless(peer: EnginePeer) -> None:
    """The second time the verdict is known."""
    for stream in (False, True):
        for name, (structured, reason) in USELESS.items():
            answer = complete(peer, structured, stream=stream)
            assert answer.status_code == 400, (name, answer.text)
            message = answer.json()["error"]["message"]
            assert message.startswith("The grammar cannot be used: "), name
            assert reason in message, name


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_costly(peer: EnginePeer, stream: bool) -> None:
    """Nobody streams: on a busy machine the check may not get its CPU time before it is late."""
    answer = complete(peer, {"json": COSTLY}, stream=stream)
    assert answer.status_code == 400, answer.text
    assert "takes more CPU time than a request may use" in answer.json()["error"]["message"]


def test_ordinary_schema(peer: EnginePeer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]+$"}}}
    for way, (path, body) in WAYS.items():
        answer = post(peer, path, body(schema))
        assert answer.status_code == 200, (way, answer.text)


def test_answers_keep_to_their_grammar(peer: EnginePeer) -> None:
    def text(structured: dict[str, Any]) -> str:
        answer = complete(peer, structured, max_tokens=16)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    chosen = text({"choice": ["left", "right"]})
    assert chosen in ("left", "right")
    assert text({"choice": ["left", "right"]}) == chosen
    assert re.fullmatch("[0-9]{3}", text({"regex": "[0-9]{3}"}))
    assert text({"grammar": 'root ::= "yes" | "no"'}) in ("yes", "no")


@pytest.mark.slow
def test_checker_that_dies_is_replaced(peer: EnginePeer) -> None:
    """A grammar that is known needs none; one that is new waits for the next checker."""
    assert complete(peer, {"choice": ["left", "right"]}).status_code == 200
    (checker,) = psutil.Process(peer.pid).children()
    checker.kill()
    assert complete(peer, {"choice": ["left", "right"]}).status_code == 200
    until(lambda: complete(peer, {"choice": ["up", "down"]}).status_code == 200, 60)


@pytest.mark.slow
async def test_compiler_that_crashes(peer: EnginePeer) -> None:
    """Without bounds the pattern ends the process that compiles it, and no other."""
    vetting = GrammarVetting("warning")
    model = ModelToLoad(name=ModelName(LLAMA), source="a", path=str(peer.paths[LLAMA]))
    loaded = peer.engines.loaded[LLAMA]

    async def verdict(structured: dict[str, Any]) -> GrammarVerdict:
        return await vetting.verdict(1, model, loaded, json.dumps(structured).encode(), "")

    found = await verdict({"json": {"type": "string", "pattern": DEEP}})
    assert (found.outcome, found.reason) == (
        "refused",
        "its compilation ends the compiler (SIGSEGV)",
    )
    assert (await verdict({"choice": ["a", "b"]})).outcome == "accepted"
    (checker,) = (one for one in psutil.Process().children() if "checker" in str(one.cmdline()))
    checker.kill()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > 1:  # it is waited for
            await asyncio.sleep(0.05)
