"""Tests of ``fleet/relay.py``; with a real node in ``tests/functional/test_continuation.py``."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from gpupoold.fleet import relay as relay_module
from gpupoold.fleet.relay import Relay, Wanted
from gpupoold.wire.continuation import Continuation

CHAT = "/v1/chat/completions"


def event(created: int = 1, reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    chunk = {"id": "x", "created": created, "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def tokens(*ids: int, reason: str = "") -> bytes:
    return f": gpupool-tokens {','.join(map(str, ids))} {reason}\n\n".encode()


def deltas(text: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0]["delta"] for line in lines]


def call(index: int, arguments: str = "", name: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name:
        found |= {"id": f"id-{name}", "type": "function"}
        found["function"]["name"] = name
    return found


def test_tokens_are_kept_and_everything_else_is_passed_on() -> None:
    relay = Relay()
    comment = b": gpupool waiting place=2\n\n"
    passed = relay.feed(comment + tokens(5, 6) + event(content="ab"))
    assert passed == comment + event(content="ab")
    assert relay.feed(tokens(7, reason="stop")[:9]) == b""
    assert relay.feed(tokens(7, reason="stop")[9:] + b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert relay.is_complete
    body = msgspec.json.decode(relay.continuation(b'{"a": 1}'), type=Continuation)
    assert (bytes(body.request), body.output_token_ids) == (b'{"a": 1}', [5, 6, 7])
    assert body.finish_reason == "stop"


@given(st.text("abc", min_size=1, max_size=30), st.data())
def test_a_continuation_has_the_rest(text: str, data: st.DataObject) -> None:
    """However the text is cut into events, on either node, and wherever the first one dies."""

    def cut() -> list[str]:
        points = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=5)))
        ends = zip([0, *points], [*points, len(text)], strict=True)
        return [text[begin:end] for begin, end in ends if end > begin]

    relay, found = Relay(), b""
    for _ in range(data.draw(st.integers(0, 3))):
        first = cut()
        relay_part = data.draw(st.integers(0, len(first)))
        found += relay.feed(event(role="assistant", content=""))
        for one in first[:relay_part]:
            found += relay.feed(event(content=one))
        relay.begin_again()
    found += relay.feed(event(2, role="assistant", content=""))
    for one in cut():
        found += relay.feed(event(2, content=one))
    found += relay.feed(event(2, reason="stop") + b"data: [DONE]\n\n")
    assert "".join(one.get("content") or "" for one in deltas(found)) == text
    assert sum("role" in one for one in deltas(found)) == 1
    assert found.count(b"[DONE]") == 1
    created = {json.loads(line[6:])["created"] for line in found.split(b"\n") if b"created" in line}
    assert len(created) == 1


def test_fields_are_counted_apart() -> None:
    relay = Relay()
    relay.feed(event(reasoning="think") + event(content="sa"))
    relay.begin_again()
    found = relay.feed(event(reasoning="thi") + event(reasoning="nking") + event(content="say"))
    assert deltas(found) == [{"reasoning": "ing"}, {"content": "y"}]


def test_tool_calls_keep_their_first_id() -> None:
    relay = Relay()
    relay.feed(event(tool_calls=[call(0, name="f")]) + event(tool_calls=[call(0, '{"a')]))
    relay.begin_again()
    found = relay.feed(
        event(tool_calls=[call(0, name="g")])
        + event(tool_calls=[call(0, '{"a": 1}')])
        + event(tool_calls=[call(1, "{}", name="h")])
    )
    assert deltas(found) == [
        {"tool_calls": [call(0, '": 1}')]},
        {"tool_calls": [call(1, "{}", name="h")]},
    ]


def test_the_end_is_not_told_twice() -> None:
    relay = Relay()
    relay.feed(event(content="a") + event(reason="stop"))
    relay.begin_again()
    assert relay.feed(event(content="a") + event(reason="stop")) == b""
    usage = b'data: {"choices":[],"usage":{"total_tokens":3},"created":1}\n\n'
    assert relay.feed(usage) == usage


def test_a_node_that_gives_up_is_not_told_to_the_client() -> None:
    relay = Relay()
    lost = b'data: {"error": {"message": "stopping", "code": 503}}\n\n'
    assert relay.feed(lost) == b""
    assert relay.lost == lost
    bad = b'data: {"error": {"message": "no", "code": 400}}\n\n'
    relay.begin_again()
    assert relay.feed(bad) == bad
    assert not relay.lost


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        Relay().feed(b"data: " + b"x" * 200)


@pytest.mark.parametrize(
    ("fields", "path", "can"),
    [
        ({}, CHAT, True),
        ({"prompt": "a"}, "/v1/completions", True),
        ({"prompt": [1, 2]}, "/v1/completions", True),
        ({"prompt": ["a", "b"]}, "/v1/completions", False),
        ({"prompt": [[1], [2]]}, "/v1/completions", False),
        ({"n": 2}, CHAT, False),
        ({"n": 1}, CHAT, True),
        ({"logprobs": True}, CHAT, False),
        ({"logprobs": 0}, "/v1/completions", False),
        ({"echo": True}, "/v1/completions", False),
        ({"stream": False}, CHAT, False),
        ({}, "/v1/messages", False),
    ],
)
def test_what_can_continue(fields: dict[str, Any], path: str, can: bool) -> None:
    body = json.dumps({"model": "m", "stream": True} | fields).encode()
    assert msgspec.json.decode(body, type=Wanted).can_continue(path) is can
