"""API keys in the frontend: who may ask what; how often is for the daemon to say."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest

from gpupoold.access.secret import make_key
from gpupoold.domain import Preset, Priority
from gpupoold.frontend.callers import Callers, cache_salt, serving, without_credentials
from gpupoold.frontend.daemon_calls import RateCalls
from gpupoold.frontend.errors import ApiError
from gpupoold.wire.messages import (
    AccessReport,
    AccessRules,
    AddRequest,
    KeyRecord,
    RateAnswer,
    ServedModel,
)
from tests.unit.frontend.asgi import Answer, request
from tests.unit.frontend.fake_rates import FakeRates
from tests.unit.frontend.test_router import CHAT, Served

NOW = 1_800_000_000.0
KEY = make_key()
MODEL = ServedModel(name="a", aliases=(), state="ready", created_at=1.0)
RECORD = KeyRecord(KEY.id, "web", KEY.digest)


class Rig:
    """Callers with a clock and a daemon of the test's own."""

    def __init__(self, *keys: KeyRecord, are_required: bool = True) -> None:
        self.wall = NOW
        self.rates = FakeRates()
        self.callers = Callers(self.rates.calls, lambda: self.wall)
        self.callers.replace(AccessRules(list(keys), are_required))

    def who(self, text: str | None = KEY.text, header: str = "bearer") -> Any:
        return self.callers.identify(headers(text, header))

    def is_let_in(self, text: str | None = KEY.text) -> bool:
        try:
            self.who(text)
        except ApiError as error:
            if error.status != 401:
                raise
            return False
        return True

    def ask(self, request_id: str, num_prompt: int) -> AddRequest:
        message = AddRequest("a", request_id, 0.0, num_prompt, 8, [b""])
        with serving(self.who(), MODEL):
            self.callers.asked(message)
        return message


def record(**changes: Any) -> KeyRecord:
    return dataclasses.replace(RECORD, **changes)


def headers(text: str | None, header: str = "bearer") -> list[tuple[bytes, bytes]]:
    if text is None:
        return [(b"accept", b"*/*")]
    if header == "bearer":
        return [(b"authorization", b"Bearer " + text.encode("latin-1"))]
    return [(header.encode(), text.encode("latin-1"))]


@pytest.mark.parametrize("header", ["bearer", "x-api-key"])
def test_key_is_known_by_either_header(header: str) -> None:
    assert Rig(RECORD).who(header=header).key == RECORD


def test_whatever_is_no_valid_key_is_refused() -> None:
    rig = Rig(RECORD)
    other = make_key(KEY.id).text
    wrong = [
        None,
        "",
        "none",
        "sk-1234",
        make_key().text,
        other,
        KEY.text[:-1],
        KEY.text + "a",
        "\xff",
    ]
    assert [text for text in wrong if rig.is_let_in(text)] == []
    with pytest.raises(ApiError, match="You did not provide"):
        rig.who(None)
    with pytest.raises(ApiError, match="is not valid") as caught:
        rig.who(other)
    assert other not in json.dumps(caught.value.body())


def test_nobody_is_let_in_before_the_daemon_has_said_who() -> None:
    with pytest.raises(ApiError, match="starting") as caught:
        Callers(FakeRates().calls).identify(headers(KEY.text))
    assert caught.value.status == 503


def test_where_no_key_is_needed_only_what_looks_like_one_is_checked() -> None:
    rig = Rig(RECORD, are_required=False)
    assert rig.who(None).key is None
    assert rig.who("none").key is None
    assert rig.who().key == RECORD
    assert not rig.is_let_in(make_key().text)


def test_key_ends_when_it_expires_and_when_it_is_gone() -> None:
    rig = Rig(record(expires_at=NOW + 10))
    assert rig.is_let_in()
    rig.wall = NOW + 10
    with pytest.raises(ApiError, match="has expired"):
        rig.who()
    assert not rig.is_let_in(make_key(KEY.id).text)
    rig.callers.replace(AccessRules([], are_required=True))
    assert not rig.is_let_in()


def test_old_secret_works_until_the_grace_is_over() -> None:
    new = make_key(KEY.id)
    rig = Rig(record(digest=new.digest, previous_digest=KEY.digest, previous_until=NOW + 60))
    assert rig.is_let_in(KEY.text)
    assert rig.is_let_in(new.text)
    rig.wall = NOW + 60
    assert not rig.is_let_in(KEY.text)
    assert rig.is_let_in(new.text)


async def test_daemon_says_whether_a_request_may_begin() -> None:
    rig = Rig(record(requests_per_minute=1))
    await rig.callers.begin(rig.who())
    rig.rates.limit, rig.rates.wait_s = "2 requests per minute", 30.0
    with pytest.raises(ApiError, match=r"`web`: 2 .* per minute\. Try again in 30s") as caught:
        await rig.callers.begin(rig.who())
    assert (caught.value.status, caught.value.retry_after_s) == (429, 30.0)
    assert rig.rates.asked == [KEY.id, KEY.id]


async def test_daemon_is_not_asked_for_keys_without_limits() -> None:
    rig = Rig(RECORD, are_required=False)
    await rig.callers.begin(rig.who())
    await rig.callers.begin(rig.who(None))
    assert rig.rates.asked == []


async def test_daemon_that_does_not_answer_in_time_is_503() -> None:
    rates = FakeRates(timeout_s=0.01)
    rates.silent = True
    with pytest.raises(ApiError) as caught:
        await rates.calls.begin(RECORD)
    assert caught.value.status == 503
    rates.silent = False
    await rates.calls.begin(RECORD)


async def test_each_question_has_its_own_answer() -> None:
    sent: list[Any] = []
    calls = RateCalls(sent.append)
    first, second = (asyncio.create_task(calls.begin(RECORD)) for _ in range(2))
    await asyncio.sleep(0)
    calls.answered(RateAnswer(sent[1].call_id, "1 tokens per minute", 5.0))
    calls.answered(RateAnswer(sent[0].call_id))
    calls.answered(RateAnswer(99))  # nobody asked that
    await first
    with pytest.raises(ApiError, match="1 tokens per minute"):
        await second


def test_request_tells_the_daemon_whose_it_is() -> None:
    message = Rig(record(priority="high")).ask("r", 3)
    assert (message.key_id, message.priority) == (KEY.id, Priority.HIGH)
    message = AddRequest("a", "r", 0.0, 1, 8, [b""])
    rig = Rig(are_required=False)
    with serving(rig.who(None), MODEL):
        rig.callers.asked(message)
    assert (message.key_id, message.priority, message.served_name) == ("", Priority.NORMAL, "")
    preset = msgspec.structs.replace(MODEL, name="p", parent="a", presets=(Preset("p"),))
    with serving(rig.who(None), preset):
        rig.callers.asked(message)
    assert message.served_name == "p"


def test_refused_strangers_are_reported_once() -> None:
    rig = Rig(RECORD)
    assert rig.callers.report() is None
    assert not rig.is_let_in("nothing")
    assert rig.callers.report() == AccessReport(1)
    assert rig.callers.report() is None


def test_applications_never_see_the_key() -> None:
    scope: MutableMapping[str, Any] = {
        "headers": [*headers(KEY.text), (b"accept", b"x")],
        "path": "/",
    }
    scope["headers"].append((b"x-api-key", KEY.text.encode()))
    assert without_credentials(scope) == {"headers": [(b"accept", b"x")], "path": "/"}
    plain = {"headers": [(b"accept", b"x")]}
    assert without_credentials(plain) is plain


# Through the router


class Guarded(Served):
    """The router's models, for those with keys: for all, for ``alpha``, and for the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.none = make_key(), make_key(), make_key()
        self.records = [
            KeyRecord(self.all.id, "all", self.all.digest),
            KeyRecord(self.some.id, "some", self.some.digest, models=("alpha",)),
            KeyRecord(self.none.id, "prometheus", self.none.digest, models=()),
        ]
        self.callers.replace(AccessRules(self.records, are_required=True))

    def as_key(self, key: Any, method: str, path: str, body: object = None, **more: Any) -> Answer:
        data = b"" if body is None else json.dumps(body).encode()
        return self.send(method, path, data, headers=headers(key.text if key else None), **more)


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("GET", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/alpha"),
        ("GET", "/v1/responses/r1"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("GET", "/no/such/path"),
        ("DELETE", "/health2"),
        ("DELETE", CHAT),
    ],
)
def test_without_a_key_everything_is_refused_alike(
    guarded: Guarded, method: str, path: str
) -> None:
    answer = guarded.as_key(None, method, path, {"model": "alpha"})
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_health_is_everybody_s(guarded: Guarded) -> None:
    assert guarded.as_key(None, "GET", "/health").status == 200
    assert guarded.as_key(None, "GET", "/ready").status == 200


def test_anthropic_s_clients_are_refused_in_their_words(guarded: Guarded) -> None:
    answer = guarded.as_key(None, "POST", "/v1/messages", {"model": "alpha"})
    assert answer.status == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_key_of_one_model(guarded: Guarded) -> None:
    assert guarded.as_key(guarded.some, "POST", CHAT, {"model": "first"}).status == 200
    rows = guarded.as_key(guarded.some, "GET", "/v1/models").json()["data"]
    assert [row["id"] for row in rows] == ["alpha"]
    assert guarded.as_key(guarded.some, "GET", "/v1/models/alpha").status == 200
    # The only one there is, for this key.
    assert guarded.as_key(guarded.some, "POST", CHAT, {}).body == b"alpha:{}"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_other_models_are_not_there_at_all(guarded: Guarded, path: str) -> None:
    real = guarded.as_key(guarded.some, "POST", path, {"model": "beta"})
    made_up = guarded.as_key(guarded.some, "POST", path, {"model": "bera"})
    assert real.status == made_up.status == 404
    assert real.body.replace(b"beta", b"bera") == made_up.body
    near = guarded.as_key(guarded.some, "POST", path, {"model": "bet"})
    assert b"beta" not in near.body
    assert guarded.as_key(guarded.some, "GET", "/v1/models/beta").status == 404


def test_responses_of_other_models_are_not_there(guarded: Guarded) -> None:
    guarded.apis["beta"].responses.add("r1")
    assert guarded.as_key(guarded.some, "GET", "/v1/responses/r1").status == 404
    assert guarded.as_key(guarded.all, "GET", "/v1/responses/r1").status == 200


def test_key_without_models_asks_none(guarded: Guarded) -> None:
    assert guarded.as_key(guarded.none, "GET", "/v1/models").json()["data"] == []
    assert guarded.as_key(guarded.none, "POST", CHAT, {"model": "alpha"}).status == 404
    assert guarded.as_key(guarded.none, "POST", CHAT, {}).status == 400


def test_metrics_are_for_those_who_may_see_all(guarded: Guarded) -> None:
    assert guarded.as_key(guarded.some, "GET", "/metrics").status == 403
    # Nothing is served there yet; but these were let through.
    for key in (guarded.all, guarded.none):
        assert guarded.as_key(key, "GET", "/metrics").status != 403


def test_body_of_a_stranger_is_not_read(guarded: Guarded) -> None:
    answer = guarded.as_key(None, "POST", CHAT, {"model": "alpha"}, stall=True)
    assert answer.status == 401


def test_rate_is_looked_at_before_the_body(guarded: Guarded) -> None:
    limited = dataclasses.replace(guarded.records[0], requests_per_minute=1)
    guarded.callers.replace(AccessRules([limited], are_required=True))
    assert guarded.as_key(guarded.all, "POST", CHAT, {"model": "alpha"}).status == 200
    guarded.rates.limit, guarded.rates.wait_s = "1 requests per minute", 60.0
    answer = guarded.as_key(guarded.all, "POST", CHAT, {"model": "alpha"}, stall=True)
    assert (answer.status, answer.headers["retry-after"]) == (429, "60")
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert "`all`: 1 requests per minute" in answer.json()["error"]["message"]
    # What is no request to a model is not counted.
    assert guarded.as_key(guarded.all, "GET", "/v1/models").status == 200


def test_key_is_taken_out_on_the_way_to_the_model(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    echo = guarded.apis["alpha"].app

    async def spy(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])
        await echo(scope, receive, send)

    monkeypatch.setattr(guarded.apis["alpha"], "app", spy)
    body = json.dumps({"model": "alpha"}).encode()
    sent = [*headers(guarded.all.text), (b"x-other", b"1")]
    assert asyncio.run(request(guarded.router, "POST", CHAT, [body], sent)).status == 200
    [kept] = seen
    assert [header for header in kept if header[0] != b"x-request-id"] == [(b"x-other", b"1")]


def test_no_salt_of_a_client_finds_the_kv_of_another_key() -> None:
    other = make_key()
    rig = Rig(RECORD, KeyRecord(other.id, "ci", other.digest), are_required=False)
    sent = [None, "", "x", ":x", f"{KEY.id}:", f"{KEY.id}:x", f"{other.id}:x", f":{KEY.id}:x"]
    salts: dict[str, set[str | None]] = {}
    for text in (KEY.text, other.text, None):
        with serving(rig.who(text), MODEL):
            salts[text or ""] = {cache_salt(one) for one in sent}
    keyed, others, anybody = salts.values()
    assert keyed.isdisjoint(others)
    assert anybody.isdisjoint(keyed | others)
    assert len(keyed) == len(sent) - 1  # no salt and an empty salt are the same
