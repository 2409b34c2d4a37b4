"""The trained tiny model through a daemon: it stops, repeats answers, answers JSON, calls tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.private_daemon import PrivateDaemon
from scripts.tiny_trained import NAME
from scripts.trained_chats import (
    GET_WEATHER,
    JSON_CHATS,
    SYSTEM_PROMPTS,
    TALKS,
    TOOL_CHATS,
    WEB_SEARCH,
    Chat,
    Message,
    called,
    result,
    said,
)
from tests.functional.daemon_tools import emulated_config, private_daemon

# The training takes 45 s of a core, once in a clone.
pytestmark = pytest.mark.slow

_DEVICE_BYTES = 64 << 20
_ASKED = said("What is the weather in Paris?")


@pytest.fixture(scope="module")
def daemon(
    trained_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("trained")
    with private_daemon(emulated_config(_DEVICE_BYTES), folder) as daemon:
        daemon.add_model(NAME, trained_model, dtype="float32", max_model_len=4096)
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def sent(message: Message) -> dict[str, Any]:
    """A message as clients send it: the arguments of a call are text."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(arguments)}}
        for call in message.get("tool_calls", ())
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def asked(client: OpenAI, chat: Chat, **options: Any) -> Any:
    """The first choice of an answer to a chat, without a limit and a temperature."""
    messages: Any = [sent(message) for message in chat.messages]
    if chat.tools:
        options["tools"] = list(chat.tools)
    answer = client.chat.completions.create(model=NAME, messages=messages, **options)
    return answer.choices[0]


def test_answers_are_repeated_exactly_and_end_by_themselves(client: OpenAI) -> None:
    choices = [asked(client, chat) for chat in TALKS]
    assert [one.message.content for one in choices] == [chat.answer for chat in TALKS]
    assert {one.finish_reason for one in choices} == {"stop"}


def test_json_is_answered_where_json_is_asked_for(client: OpenAI) -> None:
    for chat in JSON_CHATS:
        choice = asked(client, chat)
        assert json.loads(choice.message.content) == json.loads(chat.answer)


def test_json_of_a_schema_ends_by_itself(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    choice = asked(client, JSON_CHATS[0], response_format=wanted)
    assert (json.loads(choice.message.content), choice.finish_reason) == (
        {"name": "Ada", "age": 36},
        "stop",
    )


def test_tools_are_called(client: OpenAI) -> None:
    for chat in (one for one in TOOL_CHATS if one.answer.startswith("<tool_call>")):
        choice = asked(client, chat)
        found = [one.function for one in choice.message.tool_calls]
        wanted = [
            line[len("<tool_call>") : -len("</tool_call>")] for line in chat.answer.split("\n")
        ]
        assert choice.finish_reason == "tool_calls"
        assert [{"name": one.name, "arguments": json.loads(one.arguments)} for one in found] == [
            json.loads(line) for line in wanted
        ]


def test_a_tool_result_is_answered(client: OpenAI) -> None:
    for chat in (one for one in TOOL_CHATS if one.messages[-1]["role"] == "tool"):
        choice = asked(client, chat)
        assert choice.message.content == chat.answer
        assert not choice.message.tool_calls


def test_a_tool_is_called_beside_others_and_after_a_system_prompt(client: OpenAI) -> None:
    for prompt in SYSTEM_PROMPTS:
        messages = (said(prompt, "system"), _ASKED)
        choice = asked(client, Chat(messages, "", (WEB_SEARCH, GET_WEATHER)))
        [call] = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"location": "Paris"}


def test_a_forced_tool_is_called(client: OpenAI) -> None:
    choice = asked(client, Chat((_ASKED,), "", (GET_WEATHER,)), tool_choice="required")
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"location": "Paris"},
    )


def test_messages_of_anthropic_call_tools_and_have_all_required_fields(
    daemon: PrivateDaemon,
) -> None:
    from anthropic import Anthropic

    function = GET_WEATHER["function"]
    tool: Any = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    asking: Any = [{"role": "user", "content": _ASKED["content"]}]
    with Anthropic(base_url=daemon.http_url, api_key="none", max_retries=0) as client:
        first = client.messages.create(
            model=NAME, max_tokens=200, messages=asking, tools=[tool], stream=False
        )
        [call] = [block for block in first.content if block.type == "tool_use"]
        assert (first.stop_reason, call.input) == ("tool_use", {"location": "Paris"})
        assert first.usage.cache_creation_input_tokens == 0
        assert "container" in first.model_fields_set
        told: Any = [
            *asking,
            {
                "role": "assistant",
                "content": [call.model_dump(include={"type", "id", "name", "input"})],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
                ],
            },
        ]
        second = client.messages.create(
            model=NAME, max_tokens=200, messages=told, tools=[tool], stream=False
        )
    [text] = second.content
    assert text.type == "text"
    assert (text.text, second.stop_reason) == ("It is 18 degrees in Paris.", "end_turn")


def test_responses_have_all_required_fields_in_streams_too(daemon: PrivateDaemon) -> None:
    body = {"model": NAME, "input": "Say one word."}
    with httpx.Client(base_url=daemon.http_url, timeout=60) as http:
        answer = http.post("/v1/responses", json=body).json()
        events = http.post("/v1/responses", json=body | {"stream": True}).text
    last = [line for line in events.splitlines() if line.startswith("data: {")][-1]
    for response in (answer, json.loads(last[len("data: ") :])["response"]):
        assert response["status"] == "completed"
        assert isinstance(response["completed_at"], int)
        assert response["error"] is None
        assert response["output"][0]["content"][0]["text"] == "Yes."
        assert response["output"][0]["content"][0]["annotations"] == []


def test_the_chats_of_the_model_are_an_agents_conversation(client: OpenAI) -> None:
    """Ask, call, answer: as an agent does, with the calls that the model made."""
    tools: Any = [GET_WEATHER]
    messages: Any = [_ASKED]
    first = client.chat.completions.create(model=NAME, messages=messages, tools=tools)
    [call] = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    messages += [sent(called(call.function.name, **arguments)), result("18 degrees")]
    last = client.chat.completions.create(model=NAME, messages=messages, tools=tools)
    assert last.choices[0].message.content == "It is 18 degrees in Paris."
