"""What ``make bench-api`` and ``make fuzz`` make of what they saw."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.api_layer import make_figures
from benchmarks.fuzz import Outcome, note
from benchmarks.malformed_requests import MalformedRequest, malformed_requests
from benchmarks.stream_client import PATHS

SLOW = {"paced": {"tokens_per_s": 1.0}}
MALFORMED_REQUEST = MalformedRequest("cut", b"GET")


def _details() -> dict[str, Any]:
    top = {"cpu_share": 0.02, "first_screen_s": 0.9}
    return {
        "added_latency": {"whole": {"added_p50_s": 0.0009}, "streamed": {"added_p50_s": -0.001}},
        "frontend_rate": {path: {"paced": {"tokens_per_s": 20_000.0}} for path in PATHS},
        "admin": {"alone_p99_s": 0.005, "p99_s": 0.01, "top": top},
        "connections": {"idle_kept": 1000, "idle_cpu_share": 0.0, "active_completed": 500},
    }


def test_all_figures_are_reached() -> None:
    figures = dict(make_figures(_details()))
    assert len(figures) == 11
    assert all(figure["reached"] for figure in figures.values())


@pytest.mark.parametrize(
    ("part", "changes", "missed"),
    [
        ("added_latency", {"whole": {"added_p50_s": 0.0011}}, "added_latency_whole_p50_s"),
        (
            "frontend_rate",
            {PATHS[0]: {"paced": {"tokens_per_s": 1.0}}},
            "streamed_tokens_completions",
        ),
        ("admin", {"p99_s": 0.03}, "admin_p99_s"),
        ("admin", {"alone_p99_s": 0.03}, "admin_alone_p99_s"),
        ("connections", {"idle_kept": 999}, "idle_connections_kept"),
    ],
)
def test_one_that_is_missed_is_named(part: str, changes: dict[str, Any], missed: str) -> None:
    details = _details()
    details[part] |= changes
    figures = dict(make_figures(details))
    assert [name for name, figure in figures.items() if not figure["reached"]] == [missed]


def test_parts_that_were_left_out_have_no_figures() -> None:
    assert dict(make_figures({})) == {}


def test_malformed_requests_of_a_seed_are_the_same_and_of_all_kinds() -> None:
    made = list(malformed_requests(3, 500, ["one", "two"]))
    assert made == list(malformed_requests(3, 500, ["one", "two"]))
    assert made != list(malformed_requests(4, 500, ["one", "two"]))
    assert len({malformed_request.kind for malformed_request in made}) >= 13
    assert len({malformed_request.data for malformed_request in made}) > 300


@pytest.mark.parametrize(
    ("answer", "is_wrong"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", False),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 501 Not Implemented\r\n\r\n", True),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "", "code": 500}}\n\n', True),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "", "code": 503}}\n\n', False),
    ],
)
def test_server_errors_are_told_from_refusals(answer: bytes, is_wrong: bool) -> None:
    outcome = Outcome()
    note(outcome, MALFORMED_REQUEST, answer)
    assert bool(outcome.wrong) is is_wrong
    assert outcome.statuses.total() == 1


def test_no_answer_is_counted_by_kind() -> None:
    outcome = Outcome()
    note(outcome, MALFORMED_REQUEST, b"")
    assert outcome.row()["unanswered"] == {"cut": 1}
