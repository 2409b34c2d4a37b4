"""Requests that the daemon does not take, through a real frontend and vLLM's own API."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from gpupoold.wire.messages import AddRequest, ServedModel, Shutdown
from tests.functional.engine_peer import (
    EnginePeer,
    added_since,
    until,
    wait_aborted,
)

# vLLM, xgrammar and torch warn about each other; their engines run in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = "tiny-llama"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
PROMPT: dict[str, Any] = {"prompt": "hello", "max_tokens": 8}
ASKED = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/messages": CHAT,
}


@contextlib.contextmanager
def serving(tiny_models: dict[str, Path]) -> Iterator[EnginePeer]:
    with EnginePeer({LLAMA: tiny_models[LLAMA]}) as peer:
        peer.wait_ready()
        assert peer.serve(LLAMA).error_code == ""
        row = ServedModel(name=LLAMA, aliases=(), state="ready", created_at=0.0)
        peer.announce(row)
        yield peer


@pytest.fixture(scope="module")
def running(tiny_models: dict[str, Path]) -> Iterator[EnginePeer]:
    with serving(tiny_models) as peer:
        yield peer


@pytest.fixture
def peer(running: EnginePeer) -> Iterator[EnginePeer]:
    yield running
    running.num_to_admit = None
    running.hold_steps.clear()
    until(lambda: not running.engines.busy())


def post(peer: EnginePeer, path: str, **more: Any) -> httpx.Response:
    return httpx.post(peer.url + path, json={"model": LLAMA, **ASKED[path], **more}, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_refusal_is_a_status(peer: EnginePeer, path: str, stream: bool) -> None:
    peer.num_to_admit = 0
    answer = post(peer, path, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["error"]["message"] == "There are too many."
    assert body["error"]["type"] == "rate_limit_error"
    if path == "/v1/messages":
        assert body["type"] == "error"
    else:
        assert body["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_what_is_taken_is_answered(peer: EnginePeer, path: str, stream: bool) -> None:
    answer = post(peer, path, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(
        "text/event-stream" if stream else "application/json"
    )


@pytest.mark.parametrize("more", [{"n": 3}, {"prompt": ["one", "two", "three"]}])
def test_one_of_several_is_enough(peer: EnginePeer, more: dict[str, Any]) -> None:
    """No sample is answered, and those that were taken are cancelled."""
    peer.num_to_admit = 2
    start = len(peer.received)
    answer = post(peer, "/v1/completions", stream=True, max_tokens=400, ignore_eos=True, **more)
    assert answer.status_code == 429, answer.text
    ids = added_since(peer, start, LLAMA, count=3)
    wait_aborted(peer, *ids)
    until(lambda: not peer.engines.busy())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_clients_texts_stay_in_the_frontend(peer: EnginePeer, path: str) -> None:
    """Ids of the engine's requests are the server's, also for samples."""
    start = len(peer.received)
    more: dict[str, Any] = {"request_id": "of-a-client", "session_id": "of-a-client", "n": 2}
    more["vllm_xargs"] = more["kv_transfer_params"] = {"of-a-client": "of-a-client"}
    answer = post(peer, path, user="of-a-client", **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"].endswith("cmpl-of-a-client")
    server_id = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", server_id)
    asked = [one for one in peer.received[start:] if isinstance(one, AddRequest)]
    assert [one.request_id for one in asked] == [f"0_{server_id}", f"1_{server_id}"]
    assert b"of-a-client" not in msgspec.msgpack.encode(peer.received[start:])


def test_prompts_of_one_request_are_called_by_it(peer: EnginePeer) -> None:
    start = len(peer.received)
    answer = post(peer, "/v1/completions", prompt=["a", "b", "c"])
    server_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{server_id}"
    ids = added_since(peer, start, LLAMA, count=3)
    assert sorted(ids) == [server_id, f"{server_id}-2", f"{server_id}-3"]


def test_beams_are_requests_of_their_own(peer: EnginePeer) -> None:
    start = len(peer.received)
    answer = post(peer, "/v1/completions", use_beam_search=True, n=2, max_tokens=3)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    ids = added_since(peer, start, LLAMA, count=5)
    assert len(set(ids)) == len(ids)
    assert all(one.startswith(answer.headers["x-request-id"]) for one in ids)


def test_stream_begins_before_its_first_token(peer: EnginePeer) -> None:
    """Whoever is taken waits for tokens, not for the answer's headers."""
    peer.hold_steps.set()
    body = {"model": LLAMA, **PROMPT, "stream": True}
    with httpx.stream("POST", f"{peer.url}/v1/completions", json=body, timeout=30) as answer:
        assert answer.status_code == 200
        peer.hold_steps.clear()
        assert "data: [DONE]" in answer.read().decode()


def test_wrong_requests_are_told_what_is_wrong(peer: EnginePeer) -> None:
    peer.num_to_admit = 0
    assert post(peer, "/v1/completions", max_tokens=-1).status_code == 400
    assert post(peer, "/v1/chat/completions", messages=[], stream=True).status_code == 400


@pytest.mark.slow
def test_official_client_comes_again(peer: EnginePeer) -> None:
    peer.num_to_admit = 0
    start = len(peer.received)
    asked_again_s: list[float] = []

    def admit_later() -> None:
        added_since(peer, start, LLAMA)
        asked_again_s.append(time.monotonic())
        peer.num_to_admit = None

    thread = threading.Thread(target=admit_later)
    thread.start()
    with openai.OpenAI(base_url=f"{peer.url}/v1", api_key="none", max_retries=1) as api:
        answer = api.completions.create(model=LLAMA, prompt="hello", max_tokens=8)
    thread.join()
    assert answer.choices[0].finish_reason in ("length", "stop")
    # It waits for as long as Retry-After says, and does not guess.
    assert time.monotonic() - asked_again_s[0] >= 7


def test_official_client_without_retries(peer: EnginePeer) -> None:
    peer.num_to_admit = 0
    with (
        openai.OpenAI(base_url=f"{peer.url}/v1", api_key="none", max_retries=0) as api,
        pytest.raises(openai.RateLimitError) as raised,
    ):
        api.completions.create(model=LLAMA, prompt="hello", max_tokens=8, stream=True)
    assert raised.value.code == "rate_limit_exceeded"
    assert raised.value.type == "rate_limit_error"


@pytest.mark.slow
def test_a_stopping_server_asks_clients_to_try_again(tiny_models: dict[str, Path]) -> None:
    with serving(tiny_models) as peer, concurrent.futures.ThreadPoolExecutor() as threads:
        peer.hold_steps.set()
        answers = {path: threads.submit(post, peer, path) for path in ASKED}
        added_since(peer, 0, LLAMA, len(ASKED))
        peer.send(Shutdown(grace_s=4))
        for path, future in answers.items():
            answer = future.result(30)
            assert (path, answer.status_code, answer.headers.get("retry-after")) == (path, 503, "1")
            assert answer.json()["error"]["message"] == "the server is stopping"
