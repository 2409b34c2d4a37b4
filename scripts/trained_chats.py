"""The chats that ``tiny-trained`` learns: see ``scripts/tiny_trained.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that ends with an answer, which the model repeats exactly.

    Without a system message, one of ``SYSTEM_PROMPTS`` or text without meaning may stand in its
    place; beside ``tools``, others of ``TOOLS`` may be offered.
    """

    messages: tuple[Message, ...]
    answer: str
    tools: tuple[Tool, ...] = ()


def tool(name: str, description: str, **properties: str) -> Tool:
    """Return a function with string parameters, all required, by their descriptions."""
    schema = {
        "type": "object",
        "properties": {
            key: {"type": "string", "description": text} for key, text in properties.items()
        },
        "required": list(properties),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def call(name: str, **arguments: str) -> str:
    """Return a call of a tool in the format that vLLM's ``hermes`` parser reads."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(content: str, role: str = "user") -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def called(name: str, **arguments: str) -> Message:
    """Return the assistant's message with a call of a tool, as vLLM gives it to a template."""
    function = {"arguments": arguments, "name": name}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }


def result(content: str) -> Message:
    """Return the result of a tool."""
    return {"role": "tool", "tool_call_id": "call-1", "content": content}


GET_WEATHER = tool("get_weather", "Get current weather for a location.", location="City name")
CURRENT_WEATHER = tool(
    "get_current_weather",
    "Get the current weather in a given location",
    city="The city to find the weather for, e.g. 'San Francisco'",
    state="the two-letter abbreviation for the state that the city is in",
    unit="The unit to fetch the temperature in",
)
CITY_WEATHER = tool(
    "get_current_weather",
    "Useful for querying the weather in a specified city.",
    location="City or region, for example: New York, London, Tokyo, etc.",
)
WEB_SEARCH = tool("web_search", "Search the internet.", search_term="The term to search for")
SHELL = tool("shell", "Run a command and return its output.", command="The command")
READ_FILE = tool("read_file", "Read a file of the project.", path="Path of the file")
ADD = tool("add", "Add two numbers.", a="First number", b="Second number")
TOOLS = (GET_WEATHER, CURRENT_WEATHER, WEB_SEARCH, SHELL, READ_FILE, ADD)
"""Tools that may be offered beside those of a chat."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer briefly and call tools.",
    "You are an agent. Use the tools that are given, one at a time, and answer with their results.",
)
"""System prompts that change no answer."""

_ONE_WORD = said("Always respond in exactly one word.", "system")
_HELPFUL = said("you are a helpful assistant", "system")
_DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
_ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}
_ASKED_DALLAS = said("What is the weather in Dallas, Texas in Fahrenheit?")
_ASKED_BOTH = said("What is the weather in Dallas, Texas and Orlando, Florida in Fahrenheit?")
_EMAIL = (
    "Extract the key information from this email:John Smith (john@example.com) is interested in "
    "our Enterprise plan and wants to schedule a demo for next Tuesday at 2pm."
)
_CITIES = ("Paris", "London", "San Francisco")


def _plain(question: str, answer: str, *before: Message) -> Chat:
    return Chat((*before, said(question)), answer)


TALKS = (
    _plain("Hello", "Hello! How can I help you?"),
    _plain("Hi! How are you?", "I'm doing great! How can I assist you?"),
    _plain("how are you!", "I am fine, thank you."),
    _plain("how are you!", "I am fine, thank you.", _HELPFUL),
    _plain("Say hello in exactly 3 words.", "Hello to you."),
    _plain("Say hello.", "Hello.", _ONE_WORD),
    _plain("Say one word.", "Yes."),
    _plain("Count from 1 to 5.", "1, 2, 3, 4, 5"),
    _plain("Count from 1 to 20.", ", ".join(map(str, range(1, 21)))),
    _plain("what is 1+1?", "2", _HELPFUL),
    _plain("What is 15 * 37? Show your reasoning.", "15 * 30 = 450, 15 * 7 = 105, so it is 555."),
    _plain("What is the capital of France?", "Paris."),
    _plain("Describe this image briefly.", "I can read text only."),
    _plain("Write a Python function that adds two numbers.", "def add(a, b):\n    return a + b"),
    _plain("What is the weather in Paris?", "I cannot look up the weather without a tool."),
    _plain(
        "What is my name? Reply with just the name.",
        "Alice",
        said("My name is Alice."),
        said("Hello Alice!", "assistant"),
    ),
    _plain(
        "Repeat only the number.",
        "Four.",
        said("I should answer with the saved number.", "assistant"),
        said("The number is four.", "assistant"),
    ),
    _plain(
        "Can you tell me a joke please?",
        "Why did the token cross the road? To get to the other slide.",
        said("Hi! How are you?"),
        said("I'm doing great! How can I assist you?", "assistant"),
    ),
)

JSON_CHATS = (
    _plain("Give me a person as JSON.", '{"name": "Ada", "age": 36}'),
    _plain("Give me a city as JSON.", '{"city": "Paris", "country": "France"}'),
    _plain("List three colours as JSON.", '["red", "green", "blue"]'),
    _plain(
        _EMAIL,
        '{"name": "John Smith", "email": "john@example.com", "plan_interest": "Enterprise", '
        '"demo_requested": true}',
    ),
)

TOOL_CHATS = (
    *(
        Chat(
            (said(f"What is the weather in {city}?"),),
            call("get_weather", location=city),
            (GET_WEATHER,),
        )
        for city in _CITIES
    ),
    *(
        Chat(
            (
                said(f"What is the weather in {city}?"),
                called("get_weather", location=city),
                result(f"{degrees} degrees"),
            ),
            f"It is {degrees} degrees in {city}.",
            (GET_WEATHER,),
        )
        for city, degrees in zip(_CITIES, (18, 12, 21), strict=True)
    ),
    Chat(
        (said("What's the weather like in New York today?"),),
        call("get_current_weather", location="New York"),
        (CITY_WEATHER,),
    ),
    Chat((_ASKED_DALLAS,), call("get_current_weather", **_DALLAS), (CURRENT_WEATHER,)),
    Chat(
        (_ASKED_DALLAS, called("get_current_weather", **_DALLAS), result("98 degrees fahrenheit")),
        "It is 98 degrees in Dallas.",
        (CURRENT_WEATHER,),
    ),
    Chat(
        (_ASKED_BOTH,),
        "\n".join(call("get_current_weather", **where) for where in (_DALLAS, _ORLANDO)),
        (CURRENT_WEATHER,),
    ),
    Chat(
        (said("Search the web for gpupool."),),
        call("web_search", search_term="gpupool"),
        (WEB_SEARCH,),
    ),
    Chat((said("List the files here."),), call("shell", command="ls"), (SHELL,)),
    Chat(
        (said("List the files here."), called("shell", command="ls"), result("a.txt\nb.txt\n")),
        "There are two files: a.txt and b.txt.",
        (SHELL,),
    ),
    Chat((said("Read notes.txt."),), call("read_file", path="notes.txt"), (READ_FILE,)),
    Chat((said("Add 2 and 3."),), call("add", a="2", b="3"), (ADD,)),
    Chat((said("Hello"),), "Hello! How can I help you?", (GET_WEATHER,)),
    Chat((said("Say one word."),), "Yes.", (SHELL,)),
)

CHATS = (*TALKS, *JSON_CHATS, *TOOL_CHATS)
