"""Requests of ``make bench-hostile``: a kind is a function that makes the bytes of a request.

Each round's request of a kind differs from the others, so that no cache answers it. To add a kind,
write a function and name it in ``KINDS``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.malformed_requests import request_bytes

MakeRequest = Callable[[str, int], bytes]
"""Makes a request of a model's name and the number of the round."""


def _posted(path: str, model: str, **fields: Any) -> bytes:
    body = {"model": model, "max_tokens": 4} | fields
    return request_bytes("POST", path, json.dumps(body).encode())


def _deep_pattern(model: str, round_number: int) -> bytes:
    groups = 30_000 + round_number
    pattern = "(" * groups + "a" + ")" * groups
    schema = {"name": "x", "schema": {"type": "string", "pattern": pattern}}
    return _posted(
        "/v1/chat/completions",
        model,
        messages=[{"role": "user", "content": "hello"}],
        response_format={"type": "json_schema", "json_schema": schema},
    )


def _long_id(model: str, round_number: int) -> bytes:
    long_id = "x" * (9_900_000 - round_number)
    return _posted("/v1/completions", model, prompt="a", n=16, request_id=long_id)


def _long_prompt(_: str, round_number: int) -> bytes:
    """Return a request that is refused when all of it is there: the model does not exist."""
    return _posted("/v1/completions", "none", prompt="x" * (9_900_000 - round_number))


def _many_answers(model: str, round_number: int) -> bytes:
    num_samples = 16_384 - round_number
    return _posted("/v1/completions", model, prompt=["a"] * 1024, n=num_samples, temperature=1)


def _punycode_form(_: str, round_number: int) -> bytes:
    """Return a form whose charset names a codec of quadratic time: 1 s for each field."""
    text = b"e28h" + b"a" * (65_000 - round_number)
    part = b'--xx\r\nContent-Disposition: form-data; name="f0-"\r\n\r\n%s\r\n' % text
    body = part * 8 + b"--xx--\r\n"
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        "Content-Type: multipart/form-data; boundary=xx; charset=punycode\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _trailers(_: str, round_number: int) -> bytes:
    return _CHUNKED + b"0\r\n" + b"a:b\r\n" * (_FLOOD_BYTES // 5 + round_number)


def _long_trailer(_: str, round_number: int) -> bytes:
    return _CHUNKED + b"0\r\na: " + b"b" * (_FLOOD_BYTES + round_number)


def _chunk_extension(_: str, round_number: int) -> bytes:
    return _CHUNKED + b"1;" + b"x" * (_FLOOD_BYTES + round_number)


def _smuggled(model: str, round_number: int) -> bytes:
    """Return a request with a body that is a request, unless ``Upgrade`` is ignored."""
    inner = request_bytes("GET", f"/v1/models/{model}?{round_number}")
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "h2c")]
    return request_bytes("POST", "/v1/completions", inner, upgrade)


def _prompts(num_prompts: int, **wanted: Any) -> MakeRequest:
    """Return a kind with prompts of 1,000 token ids: 21,000 log-probabilities each if wanted."""

    def make(model: str, round_number: int) -> bytes:
        prompts = [[1 + round_number, *range(100, 1_099 - index)] for index in range(num_prompts)]
        return _posted("/v1/completions", model, prompt=prompts, max_tokens=1, **wanted)

    return make


def _answers(**wanted: Any) -> MakeRequest:
    """Return a kind with 23 samples of 200 tokens: 96,600 log-probabilities if wanted."""

    def make(model: str, round_number: int) -> bytes:
        messages = [{"role": "user", "content": f"hello {round_number}"}]
        fields = {"n": 23, "max_tokens": 200, "ignore_eos": True, "temperature": 1} | wanted
        return _posted("/v1/chat/completions", model, messages=messages, **fields)

    return make


def _doubled_rule(model: str, round_number: int) -> bytes:
    """Return a grammar that costs nothing for 80 characters, and then seconds for each token."""
    rules = f'root ::= "{"a" * (80 + round_number)}" x\nx ::= " " x " " | " " | x x'
    grammar = {"grammar": rules}
    return _posted("/v1/completions", model, prompt="a", max_tokens=200, structured_outputs=grammar)


def _costly_grammar(model: str, round_number: int) -> bytes:
    """Return a grammar whose cost grows slowly, so that only the worker sees too much of it."""
    rules = f'root ::= "{"a" * (round_number + 1)}" s\ns ::= " " s " " s " " s " " s | ""'
    grammar = {"grammar": rules}
    return _posted(
        "/v1/completions",
        model,
        prompt="a",
        max_tokens=1000,
        ignore_eos=True,
        structured_outputs=grammar,
    )


def _repetitions(model: str, round_number: int) -> bytes:
    detection = {"max_pattern_size": 100_000 + round_number, "min_pattern_size": 2, "min_count": 2}
    return _posted("/v1/completions", model, prompt="a", repetition_detection=detection)


def _biases(num_each: int) -> MakeRequest:
    """Return a maker of 64 prompts, each with so many biases and four strings to stop at."""

    def make(model: str, round_number: int) -> bytes:
        return _posted(
            "/v1/completions",
            model,
            prompt=[f"a {round_number}"] * 64,
            max_tokens=8,
            logit_bias={str(token): 0.5 for token in range(num_each)},
            stop=["one", "two", "three", "four"],
        )

    return make


_FLOOD_BYTES = 8 << 20
_CHUNKED = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

KINDS: Mapping[str, MakeRequest] = {
    "deep_pattern": _deep_pattern,
    "long_id": _long_id,
    "many_answers": _many_answers,
    "punycode_form": _punycode_form,
    "trailers": _trailers,
    "long_trailer": _long_trailer,
    "chunk_extension": _chunk_extension,
    "smuggled": _smuggled,
    "logprobs_of_64_prompts": _prompts(64, prompt_logprobs=20),
    "most_logprobs_of_prompts": _prompts(4, prompt_logprobs=20),
    "most_logprobs_of_answers": _answers(logprobs=True, top_logprobs=20),
    "biases_of_64_prompts": _biases(257),
    "most_biases_of_prompts": _biases(256),
    "doubled_rule": _doubled_rule,
    "repetitions": _repetitions,
    "costly_grammar": _costly_grammar,
}
MAY_END = frozenset({"trailers", "long_trailer", "chunk_extension"})
"""Kinds whose connections the server may close while the client sends, so the answer is lost."""
PERMITTED = frozenset(
    {"most_logprobs_of_prompts", "most_logprobs_of_answers", "most_biases_of_prompts"}
)
"""Kinds that are as large as their bounds permit: answered with 200, however late."""
ORDINARY: Mapping[str, MakeRequest] = {
    "most_logprobs_of_prompts": _prompts(4),
    "most_logprobs_of_answers": _answers(),
    "biases_of_64_prompts": _prompts(64),
    "most_biases_of_prompts": _prompts(64),
    "long_id": _long_prompt,
}
"""Ordinary requests of the same size as a kind, for comparison."""
TAKES_TIME = frozenset({"doubled_rule", "costly_grammar"})
"""Kinds that other processes refuse: the grammar checker, which first loads the tokenizer, or the
worker, after some hundred tokens.
"""
