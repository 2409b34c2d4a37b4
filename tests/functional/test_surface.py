"""The whole HTTP surface of a daemon against requests that nobody means well with."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.fuzz import Outcome, send_malformed_requests
from benchmarks.malformed_requests import MAX_TOKENS, malformed_requests
from benchmarks.noise import beside_a_neighbour
from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import processes
from benchmarks.stream_client import stream
from tests.functional.daemon_tools import admin_http, ps, sim_daemon, until

MODELS = ("one", "two")
CONFIG = 'devices = ["sim:2xA100"]\n'
NUM_MALFORMED_REQUESTS = 700
NUM_NEAR_LIMITS = 80
# Far more than a stream pauses for on a slow machine, far less than an event loop that is held.
PAUSE_S = 5.0
NUM_EXAMPLES, NUM_ADMIN_EXAMPLES = 2, 4
NUM_IDLE = 300
NUM_ACTIVE = 60
ANSWER_TOKENS = 24
# Modules are imported and caches filled by the first requests of each kind.
MAX_GROWTH_BYTES = 250 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("surface")
    with sim_daemon(CONFIG, folder, MODELS, max_model_len=2048) as running:
        yield running


@pytest.fixture
def unharmed(daemon: PrivateDaemon) -> Iterator[PrivateDaemon]:
    """The daemon, whose processes must be as they were afterwards, with nothing left open."""
    before = _state(daemon)
    yield daemon
    until(lambda: not ps(daemon).requests)
    until(lambda: not _with_more_files(before, _state(daemon)))
    after = _state(daemon)
    assert after.keys() == before.keys()
    assert not [pid for pid, (_, rss) in after.items() if rss > before[pid][1] + MAX_GROWTH_BYTES]
    assert _answer(daemon)["usage"]["completion_tokens"] == ANSWER_TOKENS


_State = dict[int, tuple[int, int]]


def _state(daemon: PrivateDaemon) -> _State:
    """Open files and resident bytes of all processes.

    The database of batches opens its files at the first use.
    """
    return {
        one.pid: (
            one.num_fds() - sum("/batches.db" in file.path for file in one.open_files()),
            one.memory_info().rss,
        )
        for one in processes(daemon)
    }


def generated_requests(description: Any, num_examples: int, adjust: Any) -> list[Any]:
    from benchmarks.generated import generated  # schemathesis: 0.7 s of each process's collection

    return list(generated(description, num_examples, 1, adjust))


def _with_more_files(before: _State, after: _State) -> list[int]:
    return [pid for pid, (num_files, _) in after.items() if num_files > before[pid][0]]


def _answer(daemon: PrivateDaemon) -> Any:
    body = {"model": "one", "prompt": "hello", "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{daemon.http_url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _port(daemon: PrivateDaemon) -> int:
    return int(daemon.http_url.rpartition(":")[2])


def _told(outcome: Outcome) -> list[str]:
    return [
        f"{status} {malformed_request.data[:400]!r}: {text[:400]!r}"
        for malformed_request, status, text in outcome.wrong
    ]


def test_mutated_requests_do_no_harm(unharmed: PrivateDaemon) -> None:
    outcome = asyncio.run(
        send_malformed_requests(
            _port(unharmed), malformed_requests(6, NUM_MALFORMED_REQUESTS, MODELS)
        )
    )
    assert not _told(outcome)
    assert outcome.statuses[200] > NUM_MALFORMED_REQUESTS / 10
    assert outcome.statuses[400] > NUM_MALFORMED_REQUESTS / 10
    assert outcome.row()["requests"] == NUM_MALFORMED_REQUESTS


@pytest.mark.slow
def test_requests_near_the_limits_do_no_harm(unharmed: PrivateDaemon) -> None:
    outcome, felt = beside_a_neighbour(unharmed, NUM_NEAR_LIMITS, 7, MODELS)
    assert not _told(outcome)
    assert outcome.statuses[200] > NUM_NEAR_LIMITS / 20
    assert outcome.statuses[400] > NUM_NEAR_LIMITS / 4
    assert not felt.beside.failed
    assert felt.beside.chunks > 100
    assert felt.beside.longest_pause_s < PAUSE_S


@pytest.mark.slow
def test_public_api_as_it_describes_itself(unharmed: PrivateDaemon) -> None:
    description = httpx.get(f"{unharmed.http_url}/openapi.json", timeout=60).json()
    assert {"/v1/chat/completions", "/v1/models", "/health"} <= description["paths"].keys()
    assert not description["paths"].keys() & {"/load", "/sleep", "/scale_elastic_ep"}

    def adjust(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["model"] = "one"
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], MAX_TOKENS)

    requests = generated_requests(description, NUM_EXAMPLES, adjust)
    outcome = asyncio.run(send_malformed_requests(_port(unharmed), requests))
    assert not _told(outcome)
    assert len(requests) > 2 * NUM_EXAMPLES * 8


@pytest.mark.slow
def test_admin_api_as_it_describes_itself(unharmed: PrivateDaemon) -> None:
    with admin_http(unharmed) as http:
        description = http.get("/openapi.json").json()
    assert {"/ps", "/models", "/models/{name}", "/events"} <= description["paths"].keys()

    def adjust(case: Any) -> None:
        case.query.pop("follow", None)  # such an answer has no end
        if "device" in case.path_parameters:
            case.path_parameters["device"] = 99  # what a role or a drain does is tested elsewhere

    requests = generated_requests(description, NUM_ADMIN_EXAMPLES, adjust)
    outcome = asyncio.run(send_malformed_requests(unharmed.socket_path, requests))
    assert not _told(outcome)
    assert {row.name for row in ps(unharmed).models} >= set(MODELS)


def test_idle_connections_stay_and_active_ones_complete(unharmed: PrivateDaemon) -> None:
    idle = [socket.create_connection(("127.0.0.1", _port(unharmed))) for _ in range(NUM_IDLE)]
    try:
        streamed = asyncio.run(
            stream(_port(unharmed), "/v1/completions", "two", NUM_ACTIVE, ANSWER_TOKENS)
        )
        assert (streamed.failed, streamed.tokens) == (0, NUM_ACTIVE * ANSWER_TOKENS)
        for connection in idle:
            connection.settimeout(30)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert all(connection.recv(99).startswith(b"HTTP/1.1 200") for connection in idle)
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"structured_outputs": [[]]},
        {"structured_outputs": -1},
        {"watermarking": ["a"]},
        {"top_k": 10**400},
        {"stop": ["\ud800"]},
    ],
)
def test_what_vllm_trips_over_is_the_requests_fault(
    unharmed: PrivateDaemon, changes: dict[str, Any]
) -> None:
    body = {"model": "one", "prompt": "hello", "max_tokens": 2} | changes
    answer = httpx.post(
        f"{unharmed.http_url}/v1/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


def test_stream_that_cannot_begin_is_a_bad_request(unharmed: PrivateDaemon) -> None:
    body = {"model": "one", "input": "hello", "stream": True, "background": None}
    answer = httpx.post(f"{unharmed.http_url}/v1/responses", json=body)
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]
