"""Requests near and beyond every limit, as raw bytes, drawn from a seed.

Sizes, depths and numbers are log-uniform up to the size of a body, so all orders of magnitude are
equally likely. Schemas, patterns, grammars, tools, ids, numbers of answers and prompts are
syntactically valid, so that the requests reach the code behind the parsers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

from benchmarks.malformed_requests import MAX_TOKENS, MalformedRequest, request_bytes

_GREETING = [{"role": "user", "content": "hello"}]
_Body = dict[str, Any]
_Case = tuple[str, _Body, list[tuple[str, str]]]


def near_limits(
    seed: int, count: int, models: Sequence[str], max_body_bytes: int
) -> Iterator[MalformedRequest]:
    """Draw ``count`` requests, the same for a seed; few bodies are over ``max_body_bytes``."""
    rng = Random(seed)
    for _ in range(count):
        make = rng.choice(_MAKERS)
        path, body, headers = make(rng, max_body_bytes)
        body = {"model": rng.choice(models)} | body
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        kind = make.__name__.strip("_")
        yield MalformedRequest(kind, request_bytes("POST", path, data, headers))


def ordinary(
    requests: Iterable[MalformedRequest], models: Sequence[str]
) -> Iterator[MalformedRequest]:
    """Make for each request a chat of as many bytes, as a person with a long document sends.

    Instead of a grammar the chat asks for an object of its own.
    """
    for number, request in enumerate(requests):
        body: _Body = {"model": models[number % len(models)], "max_tokens": MAX_TOKENS}
        if request.kind in _WITH_GRAMMARS:
            names = [f"title{number}", "author", "pages"]
            schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
            named = {"name": "book", "schema": schema | {"required": names}}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        text = "What does this book say? " * (len(request.data) // 25)
        data = json.dumps(body | {"messages": [{"role": "user", "content": text or "Hello"}]})
        yield MalformedRequest("ordinary", request_bytes("POST", _CHAT, data.encode()))


def log_uniform(rng: Random, most: int, least: int = 1) -> int:
    """Draw a number from ``least`` to ``most``, each order of magnitude alike."""
    return int(math.exp(rng.uniform(math.log(least), math.log(most + 1))))


# Patterns, schemas, grammars


def _pattern(rng: Random, most: int) -> str:
    size = log_uniform(rng, min(most, 1_000_000))
    return rng.choice(
        [
            "(" * size + "a" + ")" * size,
            "(?:a" * size + ")" * size,
            "(" * size + "a" + ")+" * size,
            "a|" * size + "b",
            "[" + "a-z" * size + "]",
            f"a{{{size}}}",
            f"(a{{1,{size}}}){{1,{size}}}",
            "a" * size,
            "(a*)*" * min(size, 50_000) + "b",
            "\\d" * size,
            "^" + ".*" * size + "$",
            "(?=a)" * size,
            "[^\\x00-\\U0010ffff]" * min(size, 10_000),
        ]
    )


def _nested(rng: Random, depth: int) -> _Body:
    schema: _Body = {"type": "string"}
    for _ in range(depth):
        kind = rng.randrange(4)
        if kind == 0:
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        elif kind == 1:
            schema = {"type": "array", "items": schema}
        elif kind == 2:
            schema = {"anyOf": [schema, {"type": "null"}]}
        else:
            schema = {"allOf": [schema]}
    return schema


def _schema(rng: Random, most: int) -> Any:
    size = log_uniform(rng, min(most // 40, 100_000))
    recursive = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(min(size, 5_000))}
    many = {f"p{index}": {"type": "string"} for index in range(size)}
    makers: list[Callable[[], Any]] = [
        lambda: {"type": "string", "pattern": _pattern(rng, most)},
        lambda: {"type": "object", "patternProperties": {_pattern(rng, most): {}}},
        lambda: {"type": "object", "properties": many, "required": list(many)},
        lambda: {"type": "object", "properties": many},
        lambda: {"enum": [f"v{index}" for index in range(size)]},
        lambda: {"anyOf": [{"const": f"v{index}"} for index in range(size)]},
        lambda: _nested(rng, min(size, 400)),
        lambda: recursive,
        lambda: {"$defs": definitions, "$ref": "#/$defs/d0"},
        lambda: {"type": "string", "minLength": size, "maxLength": size * 2},
        lambda: {"type": "array", "items": {"type": "integer"}, "minItems": size},
        lambda: {"type": "integer", "minimum": -(10**size % 10**300), "maximum": 10**18},
        lambda: {"type": "object", "properties": {"k" * size: {"const": "v" * size}}},
    ]
    return rng.choice(makers)()


def _grammar(rng: Random, most: int) -> str:
    size = log_uniform(rng, min(most // 20, 200_000))
    rules = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(size))
    return rng.choice(
        [
            "root ::= " + "(" * size + '"a"' + ")" * size,
            "root ::= " + '"a" | ' * size + '"b"',
            f'root ::= r0\n{rules}\nr{size} ::= "z"',
            'root ::= "' + "x" * size + '"',
            'root ::= root root | "a"' * min(size, 10),
            f'root ::= ("a" | "b"){{{size}}}',
            "start: " + "(" * size + '"a"' + ")" * size,
            "root ::= [" + "\\u4e00-\\u9fff" * size + "]",
        ]
    )


def _structural_tag(rng: Random, most: int) -> Any:
    size = log_uniform(rng, min(most // 100, 20_000))
    tags = [
        {"begin": f"<f{index}>", "schema": {"type": "string"}, "end": "</f>"}
        for index in range(size)
    ]
    return {"type": "structural_tag", "structures": tags, "triggers": ["<f"]}


def _format(rng: Random, most: int) -> _Case:
    """A schema, by one of the ways that lead to it."""
    schema = _schema(rng, most)
    return rng.choice([_chat_format, _text_format, _tools, _responses, _messages])(rng, schema)


def _chat_format(rng: Random, schema: Any) -> _Case:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wanted: _Body = rng.choice(
        [
            {"response_format": named},
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json": json.dumps(schema)}},
        ]
    )
    if rng.random() < 0.2:
        return _BATCH, _CHAT_BODY | {"messages": [_GREETING]} | wanted, []
    return _CHAT, _CHAT_BODY | wanted, []


def _text_format(rng: Random, schema: Any) -> _Case:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wanted: _Body = rng.choice(
        [{"response_format": named}, {"structured_outputs": {"json": schema}}]
    )
    return _TEXT, _TEXT_BODY | wanted, []


def _tools(rng: Random, schema: Any) -> _Case:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    return (
        _CHAT,
        _CHAT_BODY | {"tools": [tool], "tool_choice": rng.choice(["required", "auto", named])},
        [],
    )


def _responses(rng: Random, schema: Any) -> _Case:
    body: _Body = {"input": "a", "max_output_tokens": 16}
    if rng.random() < 0.5:
        return (
            _RESPONSES,
            body | {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
            [],
        )
    tool = {"type": "function", "name": "f", "parameters": schema}
    return _RESPONSES, body | {"tools": [tool], "tool_choice": "required"}, []


def _messages(rng: Random, schema: Any) -> _Case:
    tool = {"name": "f", "input_schema": schema}
    return _MESSAGES, _CHAT_BODY | {"tools": [tool], "tool_choice": {"type": "any"}}, []


def _constraint(rng: Random, most: int) -> _Case:
    """A pattern, a grammar, choices or structural tags."""
    size = log_uniform(rng, min(most // 8, 300_000))
    kind = rng.choice(["regex", "grammar", "choice", "choice", "structural_tag", "regex"])
    value: Any
    if kind == "regex":
        value = _pattern(rng, most)
    elif kind == "grammar":
        value = _grammar(rng, most)
    elif kind == "choice":
        value = rng.choice([["c" * size], [f"c{index}" for index in range(size)]])
    else:
        value = json.dumps(_structural_tag(rng, most))
    wanted: _Body = {"structured_outputs": {kind: value}}
    if rng.random() < 0.1:
        wanted = {"response_format": _structural_tag(rng, most)}
    if rng.random() < 0.5:
        return _TEXT, _TEXT_BODY | wanted, []
    return _CHAT, _CHAT_BODY | wanted, []


# Ids, numbers, lengths


def _ids(rng: Random, most: int) -> _Case:
    text = rng.choice("xé\x1b\n中\ud800") * log_uniform(rng, int(most * 0.24))
    body = _TEXT_BODY | {"messages": _GREETING, "n": log_uniform(rng, 16)}
    if rng.random() < 0.2:
        return _TEXT, body, [("X-Request-Id", "x" * log_uniform(rng, 60_000))]
    name = rng.choice(["request_id", "user", "cache_salt", "model", "session_id", "service_tier"])
    return rng.choice([_TEXT, _CHAT]), body | {name: text}, []


def _samples(rng: Random, most: int) -> _Case:
    """Many answers for many prompts."""
    size, number = log_uniform(rng, most // 7), log_uniform(rng, 2**34)
    prompts: Any = rng.choice([["a"] * size, [[300]] * size, "a" * size, [300] * size])
    many: _Body = {"prompt": prompts, "n": number, "max_tokens": 1, "temperature": 1}
    beam: _Body = {"prompt": "a", "n": number, "use_beam_search": True, "max_tokens": 2}
    chat: _Body = {"messages": _GREETING, "n": number, "max_tokens": 1}
    batch: _Body = {"messages": [_GREETING] * (size // 8 + 1), "max_tokens": 1}
    path, body = rng.choice(
        [(_TEXT, many), (_TEXT, many), (_TEXT, beam), (_CHAT, chat), (_BATCH, batch)]
    )
    return path, body, []


def _texts(rng: Random, most: int) -> _Case:
    """One long text where a short one is usual."""
    text = "a " * (log_uniform(rng, most) // 2)
    long: tuple[str, _Body] = rng.choice(
        [
            (_CHAT, _CHAT_BODY | {"messages": [{"role": "user", "content": text}]}),
            (_CHAT, _CHAT_BODY | {"chat_template_kwargs": {"x": text}}),
            (_CHAT, _CHAT_BODY | {"messages": [{"role": text, "content": "a"}]}),
            (_TEXT, {"prompt": text, "max_tokens": 4}),
            (_TEXT, {"prompt": text, "max_tokens": 4, "echo": True, "prompt_logprobs": 20}),
            (_TEXT, _TEXT_BODY | {"stop": text}),
            (_TEXT, _TEXT_BODY | {"vllm_xargs": {"x": text}}),
            (_TEXT, _TEXT_BODY | {"suffix": text}),
            (_RESPONSES, {"input": text, "max_output_tokens": 16}),
            (_RESPONSES, {"input": "a", "instructions": text, "max_output_tokens": 16}),
            (_MESSAGES, _CHAT_BODY | {"system": text}),
            ("/tokenize", {"prompt": text}),
        ]
    )
    return *long, []


def _lists(rng: Random, most: int) -> _Case:
    """Many things where few are usual."""
    size = log_uniform(rng, most // 40)
    part, numbers = {"type": "text", "text": "a"}, {str(index): 1 for index in range(size)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    long: tuple[str, _Body] = rng.choice(
        [
            (_CHAT, _CHAT_BODY | {"messages": _GREETING * size}),
            (_CHAT, _CHAT_BODY | {"messages": [{"role": "user", "content": [part] * size}]}),
            (_CHAT, _CHAT_BODY | {"tools": [tool] * (size // 2 + 1)}),
            (_CHAT, _CHAT_BODY | {"metadata": numbers}),
            (_TEXT, _TEXT_BODY | {"stop": ["a" * 20] * size}),
            (_TEXT, _TEXT_BODY | {"bad_words": ["ab cd"] * size}),
            (_TEXT, _TEXT_BODY | {"stop_token_ids": [5] * size}),
            (_TEXT, _TEXT_BODY | {"allowed_token_ids": [5, 6] * size}),
            (_TEXT, _TEXT_BODY | {"logit_bias": numbers}),
            ("/detokenize", {"tokens": [5] * (size * 10)}),
        ]
    )
    return *long, []


_WRONG: list[Any] = [1, None, "a", {}, [], {"role": "user", "content": 1}, {"type": "x"}]


def _wrong_elements(rng: Random, most: int) -> _Case:
    """Lists, or objects, of what does not belong there."""
    size = log_uniform(rng, min(most // 8, 240_000))
    wrong: list[Any] = [rng.choice(_WRONG)] * size
    message = {"role": "user", "content": wrong}
    named = dict.fromkeys(map(str, range(min(size, 48_000))), rng.choice(_WRONG))
    long: tuple[str, _Body] = rng.choice(
        [
            (_CHAT, _CHAT_BODY | {"messages": wrong}),
            (_CHAT, _CHAT_BODY | {"messages": [message]}),
            (_RESPONSES, {"input": wrong}),
            (_RESPONSES, {"input": [message]}),
            (_MESSAGES, _CHAT_BODY | {"messages": wrong}),
            (_MESSAGES, _CHAT_BODY | {"system": wrong}),
            (_TEXT, _TEXT_BODY | {"prompt": [*wrong, 1]}),
            (_TEXT, _TEXT_BODY | {"stop_token_ids": wrong}),
            (_TEXT, _TEXT_BODY | {"bad_words": wrong}),
            (_TEXT, _TEXT_BODY | {"vllm_xargs": named}),
            (_CHAT, _CHAT_BODY | {"logit_bias": named}),
            (_RESPONSES, {"input": named}),
        ]
    )
    return *long, []


def _unknown(rng: Random, most: int) -> _Case:
    """A field that nobody knows, deep, wide or long."""
    size = log_uniform(rng, most // 8)
    deep: Any = 1
    for _ in range(min(size, 900)):
        deep = [deep]
    value = rng.choice([deep, ["a"] * size, {str(i): i for i in range(size // 2)}, "x" * size])
    return _TEXT, _TEXT_BODY | {f"field{size}": value}, []


_TEXT = "/v1/completions"
_CHAT = "/v1/chat/completions"
_BATCH = "/v1/chat/completions/batch"
_RESPONSES = "/v1/responses"
_MESSAGES = "/v1/messages"

_TEXT_BODY: _Body = {"prompt": "a", "max_tokens": MAX_TOKENS}
_CHAT_BODY: _Body = {"messages": _GREETING, "max_tokens": MAX_TOKENS}

_MAKERS: list[Callable[[Random, int], _Case]] = [
    *[_format] * 4,
    *[_constraint] * 2,
    _ids,
    *[_samples] * 2,
    _texts,
    *[_lists] * 2,
    _wrong_elements,
    _unknown,
]
_WITH_GRAMMARS = frozenset({"format", "constraint"})
