"""Presets: other defaults and targets under another name, with the model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import AddPresetRequest, SetModelRequest
from gpupoold.errors import NoSuchModel, Refused, UsageError
from tests.functional.daemon_tools import (
    LLAMA,
    check,
    ps,
    until,
)

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Name a tool."}]


@pytest.fixture(scope="module")
def daemon(shared_pool: PrivateDaemon) -> Iterator[PrivateDaemon]:
    yield shared_pool
    until(lambda: not ps(shared_pool).requests)
    check(shared_pool)
    with shared_pool.client() as client:
        for preset in client.model(LLAMA).presets:
            client.remove_model(preset.name)


@pytest.fixture(scope="module")
def http(daemon: PrivateDaemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.http_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def brief(daemon: PrivateDaemon) -> str:
    """A preset with a limit, a temperature, a system message and targets."""
    request = AddPresetRequest(
        name="brief",
        base=LLAMA,
        defaults={"max_tokens": 5, "temperature": 0, "system_prompt": "Be very brief, please."},
        ttft_s=20.0,
    )
    with daemon.client() as client:
        model = client.add_preset(request)
    assert [preset.name for preset in model.presets] == ["brief"]
    return "brief"


def test_defaults_apply_unless_the_request_has_the_field(http: httpx.Client, brief: str) -> None:
    plain = http.post(
        "/v1/chat/completions", json={"model": LLAMA, "messages": USER, "max_tokens": 3}
    )
    preset = http.post("/v1/chat/completions", json={"model": brief, "messages": USER})
    assert preset.status_code == 200, preset.text
    usage = preset.json()["usage"]
    assert usage["completion_tokens"] <= 5
    assert usage["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"] + 5
    own = http.post(
        "/v1/chat/completions", json={"model": brief, "messages": USER, "max_tokens": 2}
    )
    assert own.json()["usage"]["completion_tokens"] == 2
    spelled = {"model": LLAMA, "max_tokens": 5, "temperature": 0}
    system = [{"role": "system", "content": "Be very brief, please."}]
    same = http.post("/v1/chat/completions", json={**spelled, "messages": [*system, *USER]})
    assert same.json()["choices"][0]["message"] == preset.json()["choices"][0]["message"]


@pytest.fixture(scope="module")
def capped(daemon: PrivateDaemon) -> str:
    """A preset with a limit, greedy, and with a long system message."""
    defaults = {"max_tokens": 4, "temperature": 0, "system_prompt": "Be brief. " * 5}
    with daemon.client() as client:
        client.add_preset(AddPresetRequest(name="p-cap", base=LLAMA, defaults=defaults))
        further = AddPresetRequest(name="p-max", base=LLAMA, defaults={"max_completion_tokens": 50})
        client.add_preset(further)
    return "p-cap"


@pytest.mark.parametrize(
    ("path", "fields", "num_tokens"),
    [
        (CHAT, {"messages": USER, "max_tokens": None}, 4),
        (CHAT, {"messages": USER, "max_completion_tokens": None}, 4),
        (CHAT, {"messages": USER, "max_completion_tokens": 6}, 6),
        ("/v1/completions", {"prompt": "x", "max_tokens": None}, 4),
        ("/v1/responses", {"input": "x"}, 4),
        ("/v1/responses", {"input": "x", "max_output_tokens": None}, 4),
        ("/v1/responses", {"input": "x", "max_output_tokens": 6}, 6),
        ("/v1/messages", {"messages": USER, "max_tokens": None}, 4),
        ("/v1/messages", {"messages": USER, "max_tokens": 6}, 6),
        (CHAT, {"model": "p-max", "messages": USER, "max_tokens": 5}, 5),
        (CHAT, {"model": "p-max", "messages": USER}, 50),
        ("/v1/responses", {"model": "p-max", "input": "x"}, 50),
    ],
)
def test_a_limit_by_any_name(
    http: httpx.Client, capped: str, path: str, fields: dict[str, Any], num_tokens: int
) -> None:
    body = {"model": capped, "ignore_eos": True, **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    made = usage.get("completion_tokens", usage.get("output_tokens"))
    assert made == num_tokens
    assert answer.json()["model"] == body["model"]


def test_a_temperature_of_null_is_the_preset_s(http: httpx.Client, capped: str) -> None:
    body = {"model": capped, "messages": USER, "temperature": None}
    answers = [http.post(CHAT, json=body).json()["choices"][0]["message"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"input": "x"}, "instructions"),
        ("/v1/messages", {"messages": USER, "max_tokens": 2}, "system"),
    ],
)
def test_instructions_of_null_are_the_preset_s(
    http: httpx.Client, capped: str, path: str, body: dict[str, Any], field: str
) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = http.post(path, json={"model": capped, **body, **fields})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["input_tokens"])

    own = prompt_tokens(**{field: "Hi."})
    assert prompt_tokens() == prompt_tokens(**{field: None}) > own


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_has_the_requested_name(
    http: httpx.Client, capped: str, path: str, is_stream: bool
) -> None:
    content = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(
        path, {"messages": USER}
    )
    body = {"model": capped, "stream": is_stream, **content}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert f'"model":"{capped}"' in answer.text.replace('"model": "', '"model":"')
    assert f'"model":"{LLAMA}"' not in answer.text.replace('"model": "', '"model":"')


def test_presets_are_listed_and_counted_under_their_names(
    daemon: PrivateDaemon, http: httpx.Client, brief: str
) -> None:
    rows = {row["id"]: row for row in http.get("/v1/models").json()["data"]}
    assert rows[brief]["parent"] == LLAMA
    assert "parent" not in rows[LLAMA]
    answer = http.post("/v1/completions", json={"model": brief, "prompt": "x"})
    assert answer.json()["usage"]["completion_tokens"] == 5
    metrics = http.get("/metrics").text
    assert f'gpupool_requests_total{{model="{brief}"' in metrics


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": "x", "defaults": {"no_such_field": 1}}, UsageError, "no_such_field"),
        ({"name": "x", "defaults": {"temperature": "hot"}}, UsageError, "temperature"),
        ({"name": "x", "defaults": {"temperature": -1}}, UsageError, "temperature"),
        ({"name": "x", "defaults": {"messages": []}}, UsageError, "messages"),
        ({"name": "x", "defaults": {"top_k": 99999999999999999999}}, Refused, "9999999"),
        ({"name": "x", "defaults": {"temperature": None}}, UsageError, "null"),
        ({"name": LLAMA}, Refused, LLAMA),
        ({"name": "x", "base": "nobody"}, NoSuchModel, "nobody"),
    ],
)
def test_a_wrong_preset_is_refused(
    daemon: PrivateDaemon, fields: dict[str, object], error: type[Exception], message: str
) -> None:
    request = AddPresetRequest.model_validate({"base": LLAMA, **fields})
    with daemon.client() as client, pytest.raises(error, match=message):
        client.add_preset(request)


def test_a_preset_has_no_options_or_memory_of_its_own(daemon: PrivateDaemon, brief: str) -> None:
    with daemon.client() as client:
        before = client.model(LLAMA)
        with pytest.raises(Refused, match=f"a preset of {LLAMA} and has no options"):
            client.set_model(brief, SetModelRequest(ttft_s=1.0))
        with pytest.raises(Refused, match=f"a preset of {LLAMA} and has no memory"):
            client.unload(brief)
        assert client.model(LLAMA).ttft_s == before.ttft_s


def test_removing_a_preset_leaves_the_model(daemon: PrivateDaemon, http: httpx.Client) -> None:
    with daemon.client() as client:
        client.add_preset(AddPresetRequest(name="short-lived", base=LLAMA))
        client.remove_model("short-lived")
        assert client.model(LLAMA).state == "ready"
    body = {"model": "short-lived", "prompt": "x"}
    assert http.post("/v1/completions", json=body).status_code == 404
    assert http.post("/v1/completions", json={**body, "model": LLAMA}).status_code == 200
