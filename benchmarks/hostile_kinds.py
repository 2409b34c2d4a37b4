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


KINDS: Mapping[str, MakeRequest] = {
    "deep_pattern": _deep_pattern,
    "long_id": _long_id,
    "many_answers": _many_answers,
    "punycode_form": _punycode_form,
}
