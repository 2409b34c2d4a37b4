"""Malformed requests as raw bytes, drawn from a seed.

Half of the requests are valid requests of a public endpoint with a field removed, of another type,
huge, deeply nested or not text. The rest has damaged bytes, or wrong HTTP: lengths, chunks,
methods, paths, headers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

MAX_TOKENS = 4

_TEXT = "to whom it may concern"
_GREETING = [{"role": "user", "content": "hello"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class MalformedRequest(NamedTuple):
    """Bytes to send, and what was done to make them."""

    kind: str
    data: bytes


class _Base(NamedTuple):
    method: str
    path: str
    body: dict[str, Any] | None


def malformed_requests(seed: int, count: int, models: Sequence[str]) -> Iterator[MalformedRequest]:
    """``count`` requests, the same for a seed."""
    rng = Random(seed)
    for _ in range(count):
        base = rng.choice(_bases(rng.choice(models)))
        make = rng.choice(_MAKERS)
        yield MalformedRequest(make.__name__.strip("_"), make(rng, base))


def request_bytes(
    method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
) -> bytes:
    """An HTTP request as it should be."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in headers)]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "Connection: close", "", ""])
    return head.encode("utf-8", "surrogatepass") + body


def _bases(model: str) -> list[_Base]:
    chat = {"model": model, "messages": _GREETING, "max_tokens": MAX_TOKENS}
    text = {"model": model, "prompt": _TEXT, "max_tokens": MAX_TOKENS}
    answer = {"model": model, "input": _TEXT, "max_output_tokens": MAX_TOKENS}
    return [
        _Base("POST", "/v1/completions", text),
        _Base("POST", "/v1/completions", text | {"stream": True, "n": 2, "stop": ["a"]}),
        _Base("POST", "/v1/chat/completions", chat),
        _Base("POST", "/v1/chat/completions", chat | {"stream": True, "tools": [_TOOL]}),
        _Base("POST", "/v1/chat/completions/batch", chat | {"messages": [_GREETING]}),
        _Base("POST", "/v1/responses", answer),
        _Base("POST", "/v1/responses", answer | {"stream": True}),
        _Base("POST", "/v1/messages", chat),
        _Base("POST", "/v1/messages", chat | {"stream": True, "system": "be brief"}),
        _Base("POST", "/v1/messages/count_tokens", {"model": model, "messages": _GREETING}),
        _Base("POST", "/tokenize", {"model": model, "prompt": _TEXT}),
        _Base("POST", "/tokenize", {"model": model, "messages": _GREETING}),
        _Base("POST", "/detokenize", {"model": model, "tokens": [300, 301]}),
        _Base("GET", "/v1/models", None),
        _Base("GET", f"/v1/models/{model}", None),
        _Base("GET", "/v1/responses/resp_0", None),
        _Base("POST", "/v1/responses/resp_0/cancel", {}),
        _Base("GET", "/health", None),
    ]


# Values


def _deep(rng: Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((3, 40, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", " ", "a", "\0", "\ud800", "é" * 300, "null",
    "x" * 30_000, [], [[]], [None], [0], [-1], [2**40], [[1, 2], [3]], ["a", 1], [""], {}, {"": 0},
    {"a": None}, {"type": "json_object"}, {"type": "text"}, [{"role": "user"}], [{"role": "x"}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"type": "function"}], ["a"] * 600,
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
    [{"role": "tool", "content": "x"}], [{"role": "assistant", "tool_calls": [{}]}],
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"regex": "("}, {"grammar": "root ::="}, {"json": "{"}, {"choice": []}, {"json": {"a": 1}},
    {"300": 1e9}, {"-1": 1}, {"999999999": 5}, {"x": "y"}, {"include_usage": "no"},
]  # fmt: skip

# Fields of the APIs beyond the fields of the valid requests.
_FIELDS = [
    "model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "stream", "n", "seed", "stream_options", "temperature", "top_p",
    "top_k", "min_p", "stop", "stop_token_ids", "logprobs", "top_logprobs", "echo",
    "prompt_logprobs", "logit_bias", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "best_of", "suffix", "user", "ignore_eos",
    "use_beam_search", "length_penalty", "response_format", "tools", "tool_choice",
    "parallel_tool_calls", "structured_outputs", "bad_words", "allowed_token_ids",
    "truncate_prompt_tokens", "add_special_tokens", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "documents",
    "mm_processor_kwargs", "priority", "request_id", "return_token_ids",
    "return_tokens_as_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs",
    "prompt_embeds", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "detokenize", "reasoning_effort", "include_reasoning",
    "service_tier", "store", "background", "instructions", "previous_response_id", "text",
    "reasoning", "truncation", "metadata", "include", "system", "stop_sequences", "thinking",
    "tokens", "return_token_strs", "logits_processors", "data_parallel_rank", "session_id",
    "thinking_token_budget", "watermarking", "stream_interval", "media_io_kwargs", "role",
]  # fmt: skip


# Makers


def _replace_field(rng: Random, base: _Base) -> bytes:
    """A field has another value: one that the request had, or one that the API knows."""
    body = dict(base.body or {})
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(body) if body and rng.random() < 0.3 else _FIELDS)
        body[name] = _deep(rng) if rng.random() < 0.03 else rng.choice(_VALUES)
    return _json_request(base, body)


def _remove_field(rng: Random, base: _Base) -> bytes:
    body = dict(base.body or {"model": 1})
    del body[rng.choice(sorted(body))]
    return _json_request(base, body)


def _replace_inside(rng: Random, base: _Base) -> bytes:
    """A value somewhere inside lists and objects is another one."""
    body = json.loads(json.dumps(base.body or {}))
    place: Any = body
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.2:
            place[key] = rng.choice(_VALUES)
            break
        place = place[key]
    return _json_request(base, body)


def _other_body(rng: Random, base: _Base) -> bytes:
    """A body that is no JSON object, or not quite."""
    good = json.dumps(base.body or {}).encode()
    depth = rng.choice((10, 2000, 100_000))
    bodies = [
        b"", b"null", b"[]", b"1", b'"a"', b"{", b"\xff\xfe{}", b'{"model":', good + b"}", b"\0",
        good + good, b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b"{}" * 50,
        good.replace(b'"', b"'"), good[:-1] + b',"model":"a","model":1}', b"\xef\xbb\xbf" + good,
        good.decode().encode("utf-16"), good[:-1] + b',"x":' + b"9" * 5000 + b"}",
        good[:-1] + b',"x":NaN,"y":-Infinity}', good[:-1] + b',"x":"\\ud800"}', b"a=b&c=d",
        good[:-1] + b',"x":"\xc3\x28"}', good[:-1] + b',"x":"\x00"}', b"--x\r\n\r\n--x--",
    ]  # fmt: skip
    return request_bytes(base.method, base.path, rng.choice(bodies))


def _flip_bytes(rng: Random, base: _Base) -> bytes:
    data = bytearray(_whole(base))
    for _ in range(rng.choice((1, 2, 5, 20))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _cut(rng: Random, base: _Base) -> bytes:
    data = _whole(base)
    return data[: rng.randrange(len(data))]


def _garble(rng: Random, base: _Base) -> bytes:
    """Pieces come twice, or bytes come in between."""
    data = _whole(base)
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    extra = data[start:end] if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 400))
    return data[:start] + extra + data[start:]


def _wrong_length(rng: Random, base: _Base) -> bytes:
    body = json.dumps(base.body or {}).encode()
    lengths = [
        "-1", "0", "x", "", "1e3", "0x10", " 5", "+5", "9" * 30, str(2**63), str(2**64),
        str(len(body) - 1), str(len(body) + 7), "11000000", f"{len(body)}, {len(body)}", "5\0",
    ]  # fmt: skip
    head = f"{base.method} {base.path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {rng.choice(lengths)}\r\n"
    if rng.random() < 0.2:
        head += f"Content-Length: {len(body)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + body


def _chunks(rng: Random, base: _Base) -> bytes:
    """A chunked body whose chunks are wrong."""
    body = json.dumps(base.body or {}).encode()
    size = f"{len(body):x}".encode()
    bodies = [
        size + b"\r\n" + body + b"\r\n0\r\n\r\n",
        size + b"\r\n" + body + b"\r\n",
        b"-1\r\n" + body, b"zz\r\n" + body, b"f" * 40 + b"\r\n" + body, b"\r\n\r\n",
        size + b";x=" + b"y" * 9000 + b"\r\n" + body + b"\r\n0\r\n\r\n",
        b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nTrailer: x\r\n\r\n",
        size + b"\n" + body + b"\n0\n\n", b"0\r\n\r\n" + body, b"1\r\n" + body,
    ]  # fmt: skip
    coding = rng.choice(("chunked", "chunked", "gzip, chunked", "chunked, chunked", "xchunked"))
    head = f"{base.method} {base.path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Transfer-Encoding: {coding}\r\n"
    if rng.random() < 0.2:
        head += f"Content-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    return head.encode() + rng.choice(bodies)


def _trailers(rng: Random, base: _Base) -> bytes:
    """A chunked body with extensions, or with fields after the last chunk."""
    body = json.dumps(base.body or {}).encode()
    size = f"{rng.choice(('', '0', '0' * 70_000))}{len(body):x}".encode()
    size += rng.choice((b"", b";a", b";a=b", b';a="b;c"', b";" + b"x" * 70_000, b";\0"))
    trailers = [
        b"", b"Host: evil\r\n", b"Authorization: Bearer x\r\n", b"a:\r\n", b"a\r\n", b": b\r\n",
        b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"a: b\r\n" * 20_000,
        b"a: " + b"b" * 70_000, b"a" * 70_000, b" a: b\r\n", b"a: b\n",
    ]  # fmt: skip
    head = (
        f"{base.method} {base.path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    )
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    chunk = size + b"\r\n" + body + b"\r\n" if body else b""
    end = rng.choice((b"\r\n", b"\r\n" + _whole(base), b""))
    return head.encode() + chunk + b"0\r\n" + rng.choice(trailers) + end


def _upgrades(rng: Random, base: _Base) -> bytes:
    """A wish for another protocol, with a body that may look like a request."""
    body = rng.choice((json.dumps(base.body or {}).encode(), _whole(base), b""))
    protocol = rng.choice(("h2c", "websocket", "TLS/1.0", "", "h2c, websocket", "\xff", "h" * 9000))
    options = rng.choice(("Upgrade", "Upgrade, HTTP2-Settings", "close, Upgrade", "keep-alive"))
    headers = [("Connection", options), ("Upgrade", protocol), ("HTTP2-Settings", "AAMAAABk")]
    if rng.random() < 0.2:
        headers.append(("Transfer-Encoding", "chunked"))
    method = rng.choice((base.method, base.method, "CONNECT", "PRI"))
    path = rng.choice((base.path, base.path, "evil:80", "http://evil/"))
    return request_bytes(method, path, body, headers) + rng.choice((b"", _whole(base)))


def _headers(rng: Random, base: _Base) -> bytes:
    floods = [
        [(f"X-{index}", "y") for index in range(rng.choice((50, 1000, 5000)))],
        [("X-Long", "y" * rng.choice((8000, 70_000, 300_000)))],
        [("X-" + "N" * 9000, "y")],
        [("Expect", "100-continue")],
        [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Key", "eHg=")],
        [("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA")],
        [("Content-Encoding", "gzip")], [("Content-Encoding", "identity, br")],
        [("Content-Encoding", "identity")], [("Content-Encoding", "z" * 9000)],
        [("Origin", "http://evil"), ("Access-Control-Request-Method", "POST")],
        [("Origin", "\0"), ("Origin", "null")], [("Content-Type", "text/plain")],
        [("Content-Type", "multipart/form-data; boundary=x")], [("Content-Type", "\x01")],
        [("Content-Type", "application/json; charset=utf-7")], [("X-Request-Id", "é\x7f" * 99)],
        [("Authorization", "Bearer " + "x" * 5000)], [("Cookie", "a=" + "b" * 5000)],
        [("Host", "a"), ("Host", "b")], [("X-Forwarded-For", "\0, 1.2.3.4")], [("X\0Y", "z")],
        [("X-Data-Parallel-Rank", "x")], [("X-Session-Id", "\udcff")], [("", "y")], [("a b", "c")],
        [("traceparent", "00-x")], [("endpoint-load-metrics-format", "JSON")], [("Range", "x")],
    ]  # fmt: skip
    body = json.dumps(base.body).encode() if base.body is not None else b""
    return request_bytes(base.method, base.path, body, rng.choice(floods))


def _methods(rng: Random, base: _Base) -> bytes:
    names = [
        "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PRI", "get", "",
        "FOO", "G\0T", "GET GET", "A" * 300, "\x16\x03\x01",
    ]  # fmt: skip
    body = json.dumps(base.body).encode() if base.body is not None else b""
    return request_bytes(rng.choice(names), base.path, body)


def _paths(rng: Random, base: _Base) -> bytes:
    names = [
        "", "*", "/", "//", "///v1//models", "/..", "/../../etc/passwd", "/v1/../v1/models", "/%00",
        "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/\u4e2d\u6587", "/%",
        "/v1/models/%e4%b8%ad", "/v1/models/%ff%fe", "/v1/models/%ed%a0%80", "/v1/models/",
        "/v1/models/" + "x" * 9000, "/v1/models/" + "x" * 70_000, "/v1/models/a?b=c#d",
        "/v1/responses/", "/v1/responses/%00", "/v1/responses/a/cancel", "/v1/responses/a/b/c",
        "/v1/responses/resp_0?stream=true&starting_after=x", "/v1/responses/" + "%41" * 2000,
        "http://a/v1/models", "http://localhost/v1/models", "http://localhost:1@a/v1/models",
        "https://[::1]:9/health", "http://[::1/health", "http://", "http:///health", "x://y/z",
        "//a/v1/models", "/v1/models//", "/v1/completions/", "/V1/COMPLETIONS",
        "/v1/completions?x=\0",
        "/v1/embeddings", "/metrics", "/openapi.json", "/docs", "/sleep", "/scale_elastic_ep",
        "/v1/load_lora_adapter", "/invocations", "/ping", "/server_info", "/collective_rpc",
        "/v1/audio/transcriptions", "/rerank", "/pooling", "/v1/realtime", "/inference/v1/generate",
    ]  # fmt: skip
    body = json.dumps(base.body).encode() if base.body is not None else b""
    return request_bytes(rng.choice((base.method, "GET", "POST")), rng.choice(names), body)


def _protocols(rng: Random, base: _Base) -> bytes:
    """Not HTTP/1.1, or more than one request."""
    good = _whole(base)
    return rng.choice(
        [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc", b"\r\n" * 9,
            good.replace(b"HTTP/1.1", b"HTTP/1.0"), good.replace(b"HTTP/1.1", b"HTTP/9.9"),
            good.replace(b" HTTP/1.1", b""), good.replace(b"\r\n", b"\n"), b"\0" * 2000, b"GET\r\n",
            good.replace(b"Connection: close", b"Connection: keep-alive") + good, good * 3,
            good.replace(b"\r\n", b"\r\n ", 2), rng.randbytes(rng.randrange(1, 3000)),
        ]
    )  # fmt: skip


def _whole(base: _Base) -> bytes:
    body = json.dumps(base.body).encode() if base.body is not None else b""
    return request_bytes(base.method, base.path, body)


def _json_request(base: _Base, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False)
    return request_bytes(base.method, base.path, text.encode("utf-8", "surrogatepass"))


_MAKERS: list[Callable[[Random, _Base], bytes]] = [
    *[_replace_field] * 8,
    *[_replace_inside] * 3,
    _remove_field,
    _other_body,
    _other_body,
    _flip_bytes,
    _cut,
    _garble,
    _wrong_length,
    _chunks,
    _trailers,
    _upgrades,
    _headers,
    _methods,
    _paths,
    _protocols,
]
