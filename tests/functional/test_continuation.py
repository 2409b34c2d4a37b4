"""An answer that one daemon began goes on at another one, after the tokens of the first."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.access.fleet import HEADER, make_secret, sign
from gpupoold.fleet.entrance import make_relay
from gpupoold.fleet.relays import Relay
from gpupoold.fleet.routing import RoutedBody
from gpupoold.wire.continuation import CONTINUES_HEADER
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    MIXTRAL,
    emulated_config,
    private_daemon,
    ps,
    until,
)

NUM_TOKENS = 40
LISTS = ("tokens", "token_logprobs", "text_offset")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = {"messages": [{"role": "user", "content": "Tell me of the sea"}]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, WORDS),
    "completion": (COMPLETIONS, {"prompt": "Tell me of the sea"}),
    "token ids": (COMPLETIONS, {"prompt": [5, 6, 7, 8, 9]}),
    "usage": (CHAT, {**WORDS, "stream_options": {"include_usage": True}}),
    "sampled": (CHAT, {**WORDS, "temperature": 0.9, "seed": 7}),
    "penalties": (COMPLETIONS, {"prompt": "Sea", "repetition_penalty": 1.3}),
    "grammar": (CHAT, {**WORDS, "structured_outputs": {"regex": "(ab?c|d[0-9]){12,40}"}}),
    "stop": (COMPLETIONS, {"prompt": "Tell me of the sea", "stop": ["zzzz"]}),
    "samples": (CHAT, {**WORDS, "n": 3, "temperature": 0.9, "seed": 7}),
    "logprobs of a chat": (CHAT, {**WORDS, "logprobs": True, "top_logprobs": 2}),
    "logprobs": (
        COMPLETIONS,
        {"prompt": "Tell me of the sea", "logprobs": 1, "n": 2, "temperature": 0.9, "seed": 3},
    ),
    "ids of an answer": (COMPLETIONS, {"prompt": "Sea", "return_token_ids": True}),
}
QUICK = ("chat", "grammar", "samples", "logprobs")


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TYPED: dict[str, tuple[str, dict[str, Any]]] = {
    "message": (MESSAGES, WORDS),
    "response": (RESPONSES, {"input": "Tell me of the sea"}),
}


@pytest.fixture(scope="module")
def secret() -> str:
    return make_secret()


@pytest.fixture(scope="module")
def box(
    secret: str,
    tiny_models: dict[str, Path],
    device_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrivateDaemon]:
    config = emulated_config(device_bytes)
    with private_daemon(config, tmp_path_factory.mktemp("node")) as daemon:
        for name in (LLAMA, MIXTRAL):
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        with daemon.client() as client:
            assert client.set_fleet_secret(secret).secret == secret
        yield daemon


@pytest.fixture
async def http(box: PrivateDaemon) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=box.http_url, headers=headers, timeout=60) as client:
        yield client
    until(lambda: not ps(box).requests)


def body_of(case: str, model: str = LLAMA) -> tuple[str, bytes]:
    path, fields = BODIES[case]
    base = {"model": model, "stream": True, "temperature": 0.0, "max_tokens": NUM_TOKENS}
    return path, json.dumps(base | fields).encode()


async def events(
    http: httpx.AsyncClient, secret: str, path: str, body: bytes, *, continues: bool = False
) -> AsyncIterator[bytes]:
    headers = {HEADER: sign(secret, "POST", path, body), "x-request-id": "same"}
    if continues:
        headers[CONTINUES_HEADER] = "1"
    async with http.stream("POST", path, content=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise AssertionError(await answer.aread())
        rest = b""
        async for part in answer.aiter_raw():
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                yield event + b"\n\n"


def assert_like(found: Any, expected: Any) -> None:
    """Compare all but the last digits of log-probabilities, which depend on a step's shapes."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=0.02)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_like(found[key], value)
    elif isinstance(expected, list | tuple):
        for one, value in zip(found, expected, strict=True):
            assert_like(one, value)
    else:
        assert found == expected


def relay_for(path: str, body: bytes) -> Relay:
    return make_relay(path, msgspec.json.decode(body, type=RoutedBody))


def chunks_of(text: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def told(text: bytes) -> tuple[dict[int, list[Any]], list[Any], set[Any]]:
    """Parts of each sample, the usages, and the ids and times of a whole stream."""
    chunks = chunks_of(text)
    samples: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        words, reasons, ids, logprobs = samples.setdefault(choice["index"], ["", [], [], []])
        words += choice.get("text") or choice.get("delta", {}).get("content") or ""
        reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
        ids += choice.get("token_ids") or []
        of_choice = choice.get("logprobs") or {}
        logprobs += of_choice.get("content") or ()
        logprobs += zip(*(of_choice[key] for key in LISTS if key in of_choice), strict=True)
        samples[choice["index"]][0] = words
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return samples, usages, {(chunk["id"], chunk["created"]) for chunk in chunks}


async def relayed(
    http: httpx.AsyncClient, secret: str, path: str, body: bytes, cuts: list[int]
) -> bytes:
    """What a client gets whose stream breaks after each of so many further events."""
    relay, text, continues = relay_for(path, body), b"", False
    sent = body
    for cut in [*cuts, 1 << 30]:
        num = 0
        async for event in events(http, secret, path, sent, continues=continues):
            passed = relay.feed(event)
            text += passed
            num += bool(passed)
            if num >= cut:
                break
        if relay.is_complete:
            break  # a busy frontend puts more tokens into an event
        continues = bool(relay.outputs())
        sent = relay.continuation(body) if continues else body
        relay.begin_again()
    assert relay.is_complete
    return text


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in BODIES],
)
async def test_the_text_goes_on(case: str, http: httpx.AsyncClient, secret: str) -> None:
    path, body = body_of(case)
    assert msgspec.json.decode(body, type=RoutedBody).can_continue(path)
    answer = await http.post(path, content=body)
    assert answer.status_code == 200, answer.text
    whole = told(answer.content)
    assert all(sample[0] for sample in whole[0].values())
    for cuts in ([1], [3, 20, 4], [30, 1, 1]):
        found = told(await relayed(http, secret, path, body, cuts))
        assert_like(found[:2], whole[:2])
        assert len(found[2]) == 1


async def test_the_end_is_told_although_nothing_is_left(
    http: httpx.AsyncClient, secret: str
) -> None:
    """The node dies between its last token and the end of the stream."""
    path, body = body_of("chat")
    relay, text = relay_for(path, body), b""
    async for event in events(http, secret, path, body):
        if b'"finish_reason":"length"' in event:
            break
        text += relay.feed(event)
    (output,) = relay.outputs()
    assert output.finish_reason == "length"
    assert len(output.token_ids) == NUM_TOKENS
    sent = relay.continuation(body)
    relay.begin_again()
    async for event in events(http, secret, path, sent, continues=True):
        text += relay.feed(event)
    assert told(text)[:2] == told((await http.post(path, content=body)).content)[:2]


@pytest.mark.parametrize("case", TYPED)
async def test_typed_events_go_on(case: str, http: httpx.AsyncClient, secret: str) -> None:
    path, fields = TYPED[case]
    base = {"model": LLAMA, "stream": True, "temperature": 0.0}
    limit = {"max_tokens" if path == MESSAGES else "max_output_tokens": NUM_TOKENS}
    body = json.dumps(base | limit | fields).encode()
    answer = await http.post(path, content=body, headers={"x-request-id": "same"})
    assert answer.status_code == 200, answer.text
    whole = typed_of(answer.content)
    for cuts in ([1], [2], [3, 20, 4], [30, 1, 1]):
        found = typed_of(await relayed(http, secret, path, body, cuts))
        assert found == whole, cuts


def typed_of(text: bytes) -> str:
    """The events other than deltas, with ids by order, and the text of the deltas by place."""
    texts: dict[Any, str] = {}
    events, numbers = list[Any](), list[int]()
    ids: dict[str, str] = {}
    for line in text.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        numbers.append(event.pop("sequence_number", len(numbers)))
        delta = event.get("delta")
        if isinstance(delta, dict):
            delta.pop("signature", None)
            delta = next((delta[key] for key in ("text", "thinking") if key in delta), None)
        if isinstance(delta, str):
            place = event["type"], event.get("index"), event.get("item_id")
            texts[place] = texts.get(place, "") + delta
        else:
            events.append(event)
    assert numbers == list(range(len(numbers)))
    shown = json.dumps([events, list(texts.items())], sort_keys=True)
    for found in re.findall(r"(?:msg|resp|rs|call|chatcmpl|fc)_?-?[0-9a-f]{8,}", shown):
        ids.setdefault(found, f"id {len(ids)}")
    for found, name in ids.items():
        shown = shown.replace(found, name)
    return re.sub(r'"(created_at|completed_at)": \d+', "", shown)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"outputs": []}, "1 to"),
        ({"outputs": [{"token_ids": []}]}, "1 to"),
        ({"outputs": [{"token_ids": [1] * NUM_TOKENS}]}, "leave none"),
        ({"outputs": [{"token_ids": [1 << 40]}]}, "vocabulary"),
        ({"outputs": [{"token_ids": [-1]}]}, "vocabulary"),
        ({"outputs": [{"token_ids": ["x"]}]}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    change: dict[str, Any], problem: str, http: httpx.AsyncClient, secret: str
) -> None:
    path, body = body_of("chat")
    fields = {"request": json.loads(body), "outputs": [{"token_ids": [5, 6]}]} | change
    sent = json.dumps(fields).encode()
    headers = {HEADER: sign(secret, "POST", path, sent), CONTINUES_HEADER: "1"}
    answer = await http.post(path, content=sent, headers=headers)
    text = answer.text
    assert answer.status_code == 400 or '"code": 400' in text, text
    assert problem in text


async def test_only_the_fleet_continues(http: httpx.AsyncClient, secret: str) -> None:
    path, body = body_of("chat")
    sent = json.dumps({"request": json.loads(body), "outputs": [{"token_ids": [5]}]}).encode()
    for value in ("", "t=1,d=,s=", sign(make_secret(), "POST", path, sent)):
        answer = await http.post(path, content=sent, headers={HEADER: value, CONTINUES_HEADER: "1"})
        assert answer.status_code == 401
    of_other_body = sign(secret, "POST", path, body)
    answer = await http.post(
        path, content=sent, headers={HEADER: of_other_body, CONTINUES_HEADER: "1"}
    )
    assert answer.status_code == 401
    # Without a signature the body is an ordinary one, which lacks its fields.
    answer = await http.post(path, content=sent, headers={CONTINUES_HEADER: "1"})
    assert answer.status_code in (400, 404, 422)
    plain = await http.post(path, content=body)
    assert b"gpupool-tokens" not in plain.content


def test_the_report_has_models_and_memory(box: PrivateDaemon, secret: str) -> None:
    with box.client() as client:
        report = client.fleet_report()
    assert report.is_ready
    assert report.secret == secret
    assert [one.name for one in report.models] == [LLAMA, MIXTRAL]
    assert all(one.first_token_in_s is not None for one in report.models)
    assert report.device_bytes
