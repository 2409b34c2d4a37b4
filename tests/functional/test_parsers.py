"""Recorded answers of many families through the frontend's API, by the official clients.

A scripted peer plays the daemon and the worker; no engine computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from openai import BadRequestError, OpenAI

from gpupoold.checkpoints.parsers import found_parsers
from tests.functional.family_checkpoints import encode, write_checkpoint
from tests.functional.recorded_answers import ARGUMENTS, RECORDED, THOUGHT, Recorded
from tests.functional.scripted_peer import ScriptedPeer

if TYPE_CHECKING:
    from anthropic import Anthropic

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NO_TOOLS, NO_REASONING, OTHER_TEMPLATE = "tools off", "reasoning off", "another template"
CALL = ("get_weather", ARGUMENTS)
# The names of models in the peer's frontend; a changed option each.
OPTIONS = {
    NO_TOOLS: {"tool_call_parser": "none"},
    NO_REASONING: {"reasoning_parser": "none"},
    OTHER_TEMPLATE: {"chat_template": "{{ messages[-1].content }}{# [func_name1( #}"},
}
PYTHONIC = '[get_weather(city="Oslo", days=3)]'


class Heard(NamedTuple):
    """What a client got of an answer."""

    thought: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    finish: str | None


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    paths = {
        name: write_checkpoint(folder / str(index), recorded)
        for index, (name, recorded) in enumerate(RECORDED.items())
    }
    return paths | dict.fromkeys(OPTIONS, paths["qwen3"])


@pytest.fixture(scope="module")
def peer(checkpoints: dict[str, Path]) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(checkpoints, OPTIONS) as running:
        for name, recorded in RECORDED.items():
            running.script[name] = encode(checkpoints[name], recorded)
        for name in OPTIONS:
            running.script[name] = running.script["qwen3"]
        yield running


@pytest.fixture(scope="module")
def openai(peer: ScriptedPeer) -> Iterator[OpenAI]:
    url = f"{peer.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(peer: ScriptedPeer) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=peer.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(name: str, recorded: Recorded) -> dict[str, Any]:
    request: dict[str, Any] = {"model": name, "messages": QUESTION}
    request["extra_body"] = {"chat_template_kwargs": dict(recorded.chat)}
    return request | ({"tools": [TOOL]} if recorded.calls else {})


def whole_chat(client: OpenAI, request: dict[str, Any]) -> Heard:
    choice = client.chat.completions.create(**request).choices[0]
    message = choice.message
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
    ]
    thought = getattr(message, "reasoning", None) or ""
    return Heard(thought.strip(), (message.content or "").strip(), calls, choice.finish_reason)


def streamed_chat(client: OpenAI, request: dict[str, Any]) -> Heard:
    thought = text = ""
    finish = None
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            thought += getattr(choice.delta, "reasoning", None) or ""
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                parts = calls.setdefault(call.index, ["", ""])
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
    made = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return Heard(thought.strip(), text.strip(), made, finish)


def heard_of_message(message: Any) -> Heard:
    thought = text = ""
    calls = []
    for block in message.content:
        if block.type == "thinking":
            thought += block.thinking
        elif block.type == "text":
            text += block.text
        elif block.type == "tool_use":
            calls.append((block.name, block.input))
    return Heard(thought.strip(), text.strip(), calls, message.stop_reason)


def expected(recorded: Recorded, finish: str, stop: str) -> Heard:
    return Heard(
        recorded.thought or "",
        recorded.text or "",
        [CALL] if recorded.calls else [],
        finish if recorded.calls else stop,
    )


@pytest.mark.parametrize("name", RECORDED)
def test_the_parsers_are_found(name: str, checkpoints: dict[str, Path]) -> None:
    found = found_parsers(checkpoints[name], {})
    assert (found.tool.name, found.reasoning.name) == (
        RECORDED[name].tool,
        RECORDED[name].reasoning,
    )


@pytest.mark.parametrize("name", RECORDED)
def test_chat_completions(name: str, openai: OpenAI) -> None:
    request = asked(name, RECORDED[name])
    wanted = expected(RECORDED[name], "tool_calls", "stop")
    assert whole_chat(openai, request) == wanted
    assert streamed_chat(openai, request) == wanted


@pytest.mark.parametrize("name", [name for name, one in RECORDED.items() if not one.chat])
def test_anthropic_messages(name: str, anthropic: Anthropic) -> None:
    request: dict[str, Any] = {"model": name, "messages": QUESTION, "max_tokens": 200}
    if RECORDED[name].calls:
        request["tools"] = [
            {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
        ]
    wanted = expected(RECORDED[name], "tool_use", "end_turn")
    assert heard_of_message(anthropic.messages.create(**request)) == wanted
    with anthropic.messages.stream(**request) as stream:
        assert heard_of_message(stream.get_final_message()) == wanted


@pytest.mark.parametrize("name", [NO_TOOLS, "phi-3.5"])
def test_tools_are_refused_without_a_tool_parser(name: str, openai: OpenAI) -> None:
    request = {"model": name, "messages": QUESTION, "tools": [TOOL]}
    with pytest.raises(BadRequestError, match="has no tool parser"):
        openai.chat.completions.create(**request)  # type: ignore[call-overload]
    heard = streamed_chat(openai, request | {"tool_choice": "none"})
    assert not heard.calls


def test_without_a_reasoning_parser_the_thought_stays_text(openai: OpenAI) -> None:
    request = asked(NO_REASONING, RECORDED["qwen3"])
    for hear in (whole_chat, streamed_chat):
        heard = hear(openai, request)
        assert heard.thought == ""
        assert heard.text == f"<think>\n{THOUGHT}\n</think>"
        assert heard.calls == [CALL]


def test_the_parser_of_a_given_template(
    openai: OpenAI, peer: ScriptedPeer, checkpoints: dict[str, Path]
) -> None:
    recorded = replace(RECORDED["qwen3"], answer=PYTHONIC)
    peer.script[OTHER_TEMPLATE] = encode(checkpoints[OTHER_TEMPLATE], recorded)
    request = asked(OTHER_TEMPLATE, recorded)
    assert whole_chat(openai, request) == Heard("", "", [CALL], "tool_calls")


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_what_a_model_without_tools_says(choice: Any, openai: OpenAI) -> None:
    request = asked("phi-3.5", RECORDED["phi-3.5"]) | {"tools": [TOOL], "tool_choice": choice}
    with pytest.raises(BadRequestError, match=r"gpupool set phi-3\.5 --engine tool-call-parser"):
        openai.chat.completions.create(**request)
    assert openai.chat.completions.create(**request | {"tool_choice": "none"}).choices
