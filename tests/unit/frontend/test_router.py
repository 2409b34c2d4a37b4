"""Routing by model, the router's own answers and refusals."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpupoold.config.sections import BatchSettings
from gpupoold.domain import Adapter
from gpupoold.frontend import body
from gpupoold.frontend.batches.service import BatchService
from gpupoold.frontend.callers import Callers
from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.gates import Gates, WaitComments
from gpupoold.frontend.mounts import Catalog, Mounts
from gpupoold.frontend.request_context import BytesInFlight
from gpupoold.frontend.router import Bounds, Router, Services
from gpupoold.wire.messages import AccessRules, ServedModel
from tests.unit.frontend.asgi import Answer, EchoApi, request
from tests.unit.frontend.fake_rates import FakeRates
from tests.unit.frontend.test_metrics import FakeDaemon

CHAT = "/v1/chat/completions"
LIMIT = 1000
MAX_LIVE = 20


def model(name: str, state: str = "ready", **more: Any) -> ServedModel:
    return ServedModel(name=name, state=state, created_at=5.5, **{"aliases": ()} | more)


MODELS = (
    model("alpha", aliases=("first", "org/alpha")),
    model("beta"),
    model("late", "loading", retry_after_s=2.5),
    model("unmounted"),
)


class Served:
    """A router over two mounted models; one request per call."""

    def __init__(self, models: tuple[ServedModel, ...] = MODELS) -> None:
        self.catalog = Catalog()
        self.catalog.replace(models, ready=True)
        self.mounts = Mounts()
        self.apis = {name: EchoApi(name) for name in ("alpha", "beta")}
        for name, api in self.apis.items():
            self.mounts.mount(name, api)
        self.gates = Gates(WaitComments(lambda _: None, 0.0))
        self.daemon = FakeDaemon()
        self.rates = FakeRates()
        self.callers = Callers(self.rates.calls)
        self.callers.replace(AccessRules([], are_required=False))
        self.bounds = Bounds(LIMIT, MAX_LIVE, BytesInFlight(5 * LIMIT))
        self.route()

    def route(self) -> None:
        """A new router over what there is now."""
        batches = BatchService(
            Path("/none"), BatchSettings(), self.bounds.in_flight, self.callers, runs_batches=False
        )
        services = Services(self.daemon.calls, batches)
        self.router = Router(
            self.catalog, self.mounts, self.gates, self.callers, self.bounds, services
        )

    def send(self, method: str, path: str, *chunks: bytes, **more: Any) -> Answer:
        return asyncio.run(request(self.router, method, path, chunks or (b"",), **more))

    def ask(self, body: object, path: str = CHAT) -> Answer:
        return self.send("POST", path, json.dumps(body).encode())


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.mark.parametrize("name", ["alpha", "first", "org/alpha"])
def test_body_reaches_the_named_model_unchanged(served: Served, name: str) -> None:
    answer = served.ask({"model": name, "x": 1})
    assert answer.body == b'alpha:{"model": "%s", "x": 1}' % name.encode()


def test_body_in_pieces_is_joined_and_disconnect_passes_through(served: Served) -> None:
    answer = served.send("POST", CHAT, b'{"model"', b': "be', b'ta"}')
    assert answer.body == b'beta:{"model": "beta"}'
    assert served.apis["beta"].seen_after_body == "http.disconnect"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_every_generation_path_is_routed(served: Served, path: str) -> None:
    assert served.ask({"model": "beta"}, path).status == 200


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "late"}, 503, "ServiceUnavailableError"),
        ({"model": "unmounted"}, 503, "ServiceUnavailableError"),
        ({"model": 7}, 400, "BadRequestError"),
        ({}, 400, "BadRequestError"),
        ([], 400, "BadRequestError"),
        ("text", 400, "BadRequestError"),
    ],
)
def test_refusals(served: Served, body: object, status: int, kind: str) -> None:
    answer = served.ask(body)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, kind)


def test_unknown_model_is_refused_as_openai_does(served: Served) -> None:
    answer = served.ask({"model": "gamma"})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["type"]) == (
        404,
        "model_not_found",
        "NotFoundError",
    )


def test_unready_model_says_when_to_come_back(served: Served) -> None:
    assert served.ask({"model": "late"}).headers["retry-after"] == "3"


def test_near_names_are_named(served: Served) -> None:
    assert "`alpha`" in served.ask({"model": "alhpa"}).json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"\xff\xfe", b"[" * 900, b'{"model":NaN}']
)
def test_malformed_json(served: Served, body: bytes) -> None:
    assert served.send("POST", CHAT, body).status == 400


def test_lone_surrogate_in_the_name_is_only_a_wrong_name(served: Served) -> None:
    assert served.send("POST", CHAT, b'{"model": "\\ud800"}').status in (400, 404)


def test_very_long_name_is_cut(served: Served) -> None:
    assert len(served.ask({"model": "m" * 900}).body) < 500


def test_body_over_the_limit(served: Served) -> None:
    half = b"x" * (LIMIT // 2 + 1)
    assert served.send("POST", CHAT, half, half).status == 413
    declared = [(b"content-length", str(LIMIT + 1).encode())]
    assert served.send("POST", CHAT, headers=declared).status == 413
    served.bounds.max_body_bytes = LIMIT + 2
    assert served.send("POST", CHAT, half, half).status == 400


def test_body_that_does_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    answer = served.send("POST", CHAT, b'{"model":', stall=True)
    assert answer.status == 408
    assert answer.json()["error"]["message"].endswith("has not come within 0.05 s.")


def test_client_that_leaves_while_sending_gets_nothing(served: Served) -> None:
    assert served.send("POST", CHAT, b'{"model":', leave_early=True).status == 0


def test_application_error_before_any_work_is_the_requests_fault(served: Served) -> None:
    answer = served.ask({"model": "beta", "x": "explode"})
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "The request cannot be understood: explode"
    assert served.ask({"model": "beta"}).status == 200


def test_only_model_needs_no_name() -> None:
    served = Served((model("beta"),))
    assert served.ask({"prompt": "x"}).body.startswith(b"beta:")
    assert served.ask({"model": None}).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/version", 200),
        ("GET", "/v1/models/org/alpha", 200),
        ("GET", "/v1/models/gamma", 404),
        ("POST", "/scale_elastic_ep", 404),
        ("DELETE", "/v1/models/alpha", 405),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/responses/r1", 405),
        ("GET", "/v1/responses/r1/input_items", 404),
    ],
)
def test_other_paths(served: Served, method: str, path: str, status: int) -> None:
    assert served.send(method, path).status == status


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/", "/tokenize/"])
def test_a_slash_at_the_end_changes_nothing(served: Served, path: str) -> None:
    assert served.ask({"model": "alpha"}, path).body == b'alpha:{"model": "alpha"}'


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br", "deflate", "GZIP", "identity, gzip"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_coded_body_is_refused_by_name(served: Served, coding: str, path: str) -> None:
    answer = served.send("POST", path, b"xx", headers=[(b"content-encoding", coding.encode())])
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    error = answer.json()["error"]
    assert coding.lower().removeprefix("identity, ") in error["message"]
    kind = "invalid_request_error" if path == "/v1/messages" else "UnsupportedMediaTypeError"
    assert error["type"] == kind


@pytest.mark.parametrize("coding", [b"identity", b"", b"Identity, identity"])
def test_identity_is_no_coding(served: Served, coding: bytes) -> None:
    body, headers = b'{"model": "alpha"}', [(b"content-encoding", coding)]
    assert served.send("POST", CHAT, body, headers=headers).status == 200


def test_byte_order_mark_is_left_out(served: Served) -> None:
    body = b'{"model": "alpha"}'
    for chunks in ([b"\xef\xbb\xbf" + body], [b"\xef", b"\xbb\xbf", body]):
        assert served.send("POST", CHAT, *chunks).body == b"alpha:" + body
    assert served.send("POST", CHAT, b"\xef\xbb\xbf" * 2 + body).status == 400


def test_the_address_says_where_the_api_is(served: Served) -> None:
    answer = served.send("GET", "/")
    assert answer.status == 200
    assert answer.json()["models"] == "/v1/models"
    for path in ("/api/tags", "/v1"):
        answer = served.send("GET", path)
        assert answer.status == 404
        assert "The API is below /v1" in answer.json()["error"]["message"]


def test_not_ready_is_503(served: Served) -> None:
    served.catalog.replace(MODELS, ready=False)
    assert served.send("GET", "/ready").status == 503
    assert served.send("GET", "/health").status == 200


class TestStart:
    """Requests of a server that has just been started."""

    @pytest.fixture
    def starting(self) -> Served:
        served = Served()
        served.bounds.hold_until_s = time.monotonic() + 30.0
        return served

    def answer_meanwhile(self, served: Served, name: str, *events: Callable[[], None]) -> Answer:
        async def both() -> Answer:
            body = json.dumps({"model": name}).encode()
            asked = asyncio.create_task(request(served.router, "POST", CHAT, (body,)))
            for event in events:
                await asyncio.sleep(0.1)
                assert not asked.done()
                event()
            return await asked

        return asyncio.run(both())

    def test_they_wait_until_the_model_is_loaded_and_mounted(self, starting: Served) -> None:
        loaded = (*MODELS[:2], model("late"))
        answer = self.answer_meanwhile(
            starting,
            "late",
            lambda: starting.catalog.replace(loaded, ready=True),
            lambda: starting.mounts.mount("late", EchoApi("late")),
        )
        assert (answer.status, answer.body) == (200, b'late:{"model": "late"}')

    def test_they_wait_for_the_list_of_models(self, starting: Served) -> None:
        starting.catalog = Catalog()
        starting.route()
        answer = self.answer_meanwhile(
            starting, "beta", lambda: starting.catalog.replace(MODELS, ready=True)
        )
        assert answer.status == 200

    def test_a_model_that_fails_ends_the_wait(self, starting: Served) -> None:
        failed = (model("late", "failed", reason="no such layer"),)
        answer = self.answer_meanwhile(
            starting, "late", lambda: starting.catalog.replace(failed, ready=True)
        )
        assert answer.status == 503
        assert "no such layer" in answer.json()["error"]["message"]

    def test_the_wait_ends_with_the_time_for_it(self, starting: Served) -> None:
        def end_hold() -> None:
            starting.bounds.hold_until_s = 0.0

        answer = self.answer_meanwhile(starting, "late", end_hold)
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")

    def test_nobody_waits_for_a_model_that_was_here_before(self, starting: Served) -> None:
        starting.catalog.replace((model("beta", "loading"),), ready=True)
        assert starting.ask({"model": "beta"}).status == 503
        assert starting.ask({"model": "gamma"}).status == 404


def test_a_model_that_has_failed_says_when_to_come_again(served: Served) -> None:
    failed = model("late", "failed", reason="it crashed", retry_at_s=time.monotonic() + 40.0)
    served.catalog.replace((failed,), ready=True)
    answer = served.ask({"model": "late"})
    assert answer.status == 503
    assert 35 <= int(answer.headers["retry-after"]) <= 40
    over = model("late", "failed", retry_at_s=time.monotonic() - 40.0)
    served.catalog.replace((over,), ready=True)
    assert served.ask({"model": "late"}).headers["retry-after"] == "1"


def test_stored_response_is_asked_of_its_model(served: Served) -> None:
    served.apis["beta"].responses.add("r1")
    assert served.send("GET", "/v1/responses/r1").body == b"beta:"
    assert served.send("POST", "/v1/responses/r1/cancel").body == b"beta:"
    assert served.send("GET", "/v1/responses/r2").status == 404


def test_anthropic_errors_have_their_shape(served: Served) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for wrong, kind in (
            ({"model": "gamma"}, "not_found_error"),
            ({"model": 7}, "invalid_request_error"),
            ({"model": "late"}, "overloaded_error"),
            ({"model": "beta", "x": "explode"}, "invalid_request_error"),
        ):
            answer = served.ask(wrong, path)
            assert answer.json()["type"] == "error"
            assert answer.json()["error"].keys() == {"type", "message"}
            assert answer.json()["error"]["type"] == kind
    too_large = served.send("POST", "/v1/messages", b"x" * (LIMIT + 1))
    assert (too_large.status, too_large.json()["error"]["type"]) == (413, "request_too_large")
    assert served.send("GET", "/v1/messages").json()["error"]["type"] == "invalid_request_error"


def test_name_wins_over_an_alias_spelt_the_same() -> None:
    catalog = Catalog()
    catalog.replace([model("a", aliases=("b",)), model("b")], ready=True)
    assert catalog.find("b").name == "b"


def test_answers_have_an_id_of_the_servers(served: Served) -> None:
    answers = [
        served.ask({"model": "beta"}),
        served.ask({"model": "gamma"}),
        served.send("GET", "/health"),
    ]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, b"a\x1b[2J", b"caf\xc3\xa9"])
def test_what_is_no_id_is_refused(served: Served, sent: bytes) -> None:
    headers = [(b"x-request-id", sent)]
    answer = served.send("POST", CHAT, b'{"model": "beta"}', headers=headers)
    assert answer.status == 400
    assert "128" in answer.json()["error"]["message"]
    as_field = {"model": "beta", "request_id": sent.decode("latin-1")}
    assert served.ask(as_field).status == 400


def test_too_many_answers_are_refused(served: Served) -> None:
    refused = served.ask({"model": "beta", "prompt": ["a"] * 3, "n": 7}, "/v1/completions")
    assert refused.status == 400
    assert "21 answers" in refused.json()["error"]["message"]
    assert served.ask({"model": "beta", "n": 20}).status == 200
    served.bounds.max_live_requests = 19
    assert served.ask({"model": "beta", "n": 20}).status == 400


def test_bytes_count_as_often_as_they_are_answered(served: Served) -> None:
    text = "x" * (LIMIT - 100)
    assert served.ask({"model": "beta", "prompt": text, "n": 5}).status == 200
    refused = served.ask({"model": "beta", "prompt": text, "n": 6})
    assert refused.status == 413
    assert str(f"{5 * LIMIT:,}") in refused.json()["error"]["message"]
    assert served.bounds.in_flight.num_bytes == 0


def test_no_room_beside_others(served: Served) -> None:
    with served.bounds.in_flight.holding("") as holding:
        holding.add(5 * LIMIT - 10)
        refused = served.ask({"model": "beta"})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert served.ask({"model": "beta"}).status == 200


def test_too_many_values(served: Served) -> None:
    served.bounds.max_body_bytes = served.bounds.in_flight.max_bytes = 1_000_000
    refused = served.send("POST", CHAT, b'{"model": "beta", "x": [' + b"[]," * 20_000)
    assert refused.status == 400
    assert "5,000 objects and arrays" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("method", "body"), [("GET", b"up 1\n"), ("HEAD", b"")])
def test_metrics_come_from_the_daemon(served: Served, method: str, body: bytes) -> None:
    answer = served.send(method, "/metrics")
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["content-length"] == "5"


def test_metrics_are_503_when_the_daemon_does_not_answer(served: Served) -> None:
    daemon = FakeDaemon(timeout_s=0.01)
    daemon.silent = True
    served.daemon = daemon
    served.route()
    answer = served.send("GET", "/metrics")
    assert answer.status == 503
    assert answer.headers["retry-after"]
    assert "has not sent its metrics" in answer.json()["error"]["message"]


def test_metrics_are_only_read(served: Served) -> None:
    assert served.send("POST", "/metrics").status == 405
    assert served.daemon.asked == []


def test_description_has_what_is_served(served: Served) -> None:
    paths = served.send("GET", "/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/models"} <= paths.keys()
    assert "/sleep" not in paths


def test_description_without_a_model_has_our_own_paths(served: Served) -> None:
    served.mounts = Mounts()
    served.route()
    paths = served.send("GET", "/openapi.json").json()["paths"]
    assert "/v1/models" in paths
    assert "/v1/completions" not in paths


class TestAdapters:
    """An adapter is a name of its own, served by the API of its model."""

    def served(self) -> Served:
        adapter = Adapter("adapted", "source", "/path", rank=8, number=1)
        return Served((model("alpha", adapters=(adapter,)),))

    def test_its_requests_reach_the_model(self) -> None:
        answer = self.served().ask({"model": "adapted"})
        assert answer.body == b'alpha:{"model": "adapted"}'

    def test_it_is_listed_with_its_parent(self) -> None:
        rows = self.served().send("GET", "/v1/models").json()["data"]
        assert [(row["id"], row.get("parent")) for row in rows] == [
            ("alpha", None),
            ("adapted", "alpha"),
        ]

    def test_a_request_without_a_name_is_for_the_only_model(self) -> None:
        assert self.served().ask({}).body == b"alpha:{}"

    def test_access_to_an_adapter_is_no_access_to_its_model(self) -> None:
        catalog = self.served().catalog
        assert catalog.choose("adapted", frozenset({"adapted"})).parent == "alpha"
        for name, scope in (("alpha", {"adapted"}), ("adapted", {"alpha"})):
            with pytest.raises(ApiError):
                catalog.choose(name, frozenset(scope))
