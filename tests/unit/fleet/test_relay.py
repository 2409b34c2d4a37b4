"""Tests of ``fleet/relays.py``; with a real node in ``tests/functional/test_continuation.py``."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from gpupoold.fleet import relays
from gpupoold.fleet.entrance import make_relay
from gpupoold.fleet.relays import Relay
from gpupoold.fleet.routing import CHAT, COMPLETIONS, MESSAGES, RESPONSES, RoutedBody
from gpupoold.wire.continuation import Continuation, OutputSoFar


def event(created: int = 1, reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    chunk = {"id": "x", "created": created, "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def tokens(*ids: int, reason: str = "", number: int = 0) -> bytes:
    return f": gpupool-tokens {number} {','.join(map(str, ids))} {reason}\n\n".encode()


def relay_of(path: str = CHAT, **fields: Any) -> Relay:
    return make_relay(path, msgspec.convert(fields, RoutedBody))


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
    relay = relay_of()
    comment = b": gpupool waiting place=2\n\n"
    passed = relay.feed(comment + tokens(5, 6) + event(content="ab"))
    assert passed == comment + event(content="ab")
    assert relay.feed(tokens(7, reason="stop")[:9]) == b""
    assert relay.feed(tokens(7, reason="stop")[9:] + b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert relay.is_complete
    body = msgspec.json.decode(relay.continuation(b'{"a": 1}'), type=Continuation)
    assert bytes(body.request) == b'{"a": 1}'
    assert body.outputs == [OutputSoFar([5, 6, 7], "stop")]


@given(st.text("abc", min_size=1, max_size=30), st.data())
def test_a_continuation_has_the_rest(text: str, data: st.DataObject) -> None:
    """However the text is cut into events, on either node, and wherever the first one dies."""

    def cut() -> list[str]:
        points = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=5)))
        ends = zip([0, *points], [*points, len(text)], strict=True)
        return [text[begin:end] for begin, end in ends if end > begin]

    relay, found = relay_of(), b""
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
    relay = relay_of()
    relay.feed(event(reasoning="think") + event(content="sa"))
    relay.begin_again()
    found = relay.feed(event(reasoning="thi") + event(reasoning="nking") + event(content="say"))
    assert deltas(found) == [{"reasoning": "ing"}, {"content": "y"}]


def test_tool_calls_keep_their_first_id() -> None:
    relay = relay_of()
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
    relay = relay_of()
    relay.feed(event(content="a") + event(reason="stop"))
    relay.begin_again()
    assert relay.feed(event(content="a") + event(reason="stop")) == b""
    usage = b'data: {"choices":[],"usage":{"total_tokens":3},"created":1}\n\n'
    assert relay.feed(usage) == usage


def test_samples_are_continued_each_after_its_own_tokens() -> None:
    relay = relay_of(n=3)
    relay.feed(tokens(1, 2, number=1) + tokens(5, number=0, reason="stop") + event(content="a"))
    relay.feed(tokens(3, number=1))
    assert relay.outputs() == [OutputSoFar([5], "stop"), OutputSoFar([1, 2, 3])]
    with pytest.raises(ValueError, match="sample 5000"):
        relay.feed(tokens(1, number=5000))


def with_logprobs(*numbers: float) -> bytes:
    found = {"content": [{"token": "a", "logprob": one} for one in numbers]}
    choice = {"index": 0, "delta": {"content": "a" * len(numbers)}, "logprobs": found}
    return b"data: " + json.dumps({"choices": [choice], "created": 1}).encode() + b"\n\n"


def test_logprobs_of_repeated_tokens_are_never_told() -> None:
    relay = relay_of(logprobs=True)
    relay.feed(tokens(1, 2, 3) + with_logprobs(-1.0, -2.0))
    assert relay.outputs() == [OutputSoFar([1, 2])], "the third one's are not at the client"
    relay.begin_again()
    found = relay.feed(with_logprobs(0.0) + with_logprobs(0.0, -3.0))
    (line,) = found.splitlines()[:1]
    assert json.loads(line[6:]) == json.loads(with_logprobs(-3.0)[6:])
    assert relay.can_continue
    relay.feed(event(reasoning="hm"))
    assert not relay.can_continue


def typed(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def message(*texts: str, signature: str = "") -> bytes:
    deltas = b"".join(
        typed("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        for text in texts
    )
    sign = {"type": "signature_delta", "signature": signature}
    return (
        typed("message_start", message={"id": "m"})
        + typed("content_block_start", index=0)
        + deltas
        + (typed("content_block_delta", index=0, delta=sign) if signature else b"")
    )


def test_a_message_has_the_rest() -> None:
    relay = relay_of(MESSAGES)
    assert relay.feed(message("data: a", "b")) == message("data: a", "b")
    relay.begin_again()
    rest = relay.feed(message("data: ", "abc", signature="x") + typed("message_stop"))
    assert rest == message("c", signature="x").replace(message(), b"") + typed("message_stop")
    assert relay.is_complete


def test_a_node_that_stops_does_not_end_a_message() -> None:
    relay = relay_of(MESSAGES)
    relay.feed(message("a"))
    assert relay.feed(typed("error", error={"type": "internal_error", "message": "m"})) == b""
    assert relay.lost
    assert b"overloaded_error" in relay.ending("no node")


def test_an_end_before_the_first_event_has_the_form_of_the_api() -> None:
    ends = {path: relay_of(path).ending("no") for path in (CHAT, MESSAGES, RESPONSES)}
    assert b'"code":503' in ends[CHAT]
    assert b'"overloaded_error"' in ends[MESSAGES]
    assert b'"code":"503"' in ends[RESPONSES]
    assert b'"sequence_number":0' in ends[RESPONSES]


def response(name: str, *texts: str, first: int = 0) -> bytes:
    about: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": {"id": f"resp_{name}", "created_at": ord(name)}}),
        ("response.output_item.added", {"output_index": 0, "item": {"id": f"msg_{name}"}}),
    ]
    place = {"item_id": f"msg_{name}", "output_index": 0}
    about += [("response.output_text.delta", {"delta": text, **place}) for text in texts]
    return b"".join(
        typed(kind, **fields, sequence_number=number)
        for number, (kind, fields) in enumerate(about, first)
    )


def test_a_response_keeps_its_ids_and_numbers() -> None:
    relay = relay_of(RESPONSES)
    assert relay.feed(response("a", "one", "two")) == response("a", "one", "two")
    relay.begin_again()
    end: dict[str, Any] = {"response": {"id": "resp_b", "created_at": 98}, "sequence_number": 9}
    found = relay.feed(response("b", "onetw", "othree") + typed("response.completed", **end))
    place: dict[str, Any] = {"item_id": "msg_a", "output_index": 0}
    end |= {"response": {"id": "resp_a", "created_at": 97}, "sequence_number": 5}
    rest = typed("response.output_text.delta", delta="three", **place, sequence_number=4)
    assert found == rest + typed("response.completed", **end)
    assert relay.is_complete
    assert b'"sequence_number":6' in relay.ending("no node")


def test_a_node_that_gives_up_is_not_told_to_the_client() -> None:
    relay = relay_of()
    lost = b'data: {"error": {"message": "stopping", "code": 503}}\n\n'
    assert relay.feed(lost) == b""
    assert relay.lost == lost
    bad = b'data: {"error": {"message": "no", "code": 400}}\n\n'
    relay.begin_again()
    assert relay.feed(bad) == bad
    assert not relay.lost


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        relay_of().feed(b"data: " + b"x" * 200)


def test_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "MAX_TOKENS", 10)
    relay = relay_of()
    relay.feed(b": gpupool-tokens 0 1,2,3,4,5,6 \n\n")
    with pytest.raises(ValueError, match="more than 10 tokens"):
        relay.feed(b": gpupool-tokens 1 1,2,3,4,5 \n\n")


def test_a_long_event_in_many_parts() -> None:
    relay, part = relay_of(), b": " + b"x" * 98
    for _ in range(100_000):
        relay.feed(part)  # 10 MB; joined and searched at each part they took minutes
    assert relay.feed(b"\n") == b""
    assert len(relay.feed(b"\n")) == 100 * 100_000 + 2


@pytest.mark.parametrize(
    ("fields", "path", "can"),
    [
        ({}, CHAT, True),
        ({"prompt": "a"}, COMPLETIONS, True),
        ({"prompt": [1, 2]}, COMPLETIONS, True),
        ({"prompt": ["a", "b"]}, COMPLETIONS, False),
        ({"prompt": [[1], [2]]}, COMPLETIONS, False),
        ({"n": 2}, CHAT, True),
        ({"logprobs": True}, CHAT, True),
        ({"best_of": 2}, COMPLETIONS, False),
        ({"echo": True}, COMPLETIONS, False),
        ({"stream": False}, CHAT, False),
        ({}, MESSAGES, True),
        ({"stream": False}, MESSAGES, False),
        ({}, RESPONSES, True),
        ({"tools": [{"type": "function", "name": "f"}]}, RESPONSES, True),
        ({"tools": [{"type": "web_search"}]}, RESPONSES, False),
        ({"tools": 3}, RESPONSES, False),
        ({"include": ["message.output_text.logprobs"]}, RESPONSES, False),
        ({"background": True}, RESPONSES, False),
        ({}, "/v1/embeddings", False),
    ],
)
def test_what_can_continue(fields: dict[str, Any], path: str, can: bool) -> None:
    body = json.dumps({"model": "m", "stream": True} | fields).encode()
    assert msgspec.json.decode(body, type=RoutedBody).can_continue(path) is can
