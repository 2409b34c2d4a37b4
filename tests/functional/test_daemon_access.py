"""Who gets in: API keys over HTTPS, the groups of the admin socket, and that nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from gpupool_cli.main import app
from gpupoold.api.schemas_access import SetKeyRequest
from tests.certificates import make_certificate
from tests.functional.access_box import (
    ADMINS,
    CONFIG,
    MAX_LIVE,
    MODELS,
    PROMPT,
    READERS,
    STRANGER,
    Box,
    answer,
    as_somebody,
    places,
    refusal,
    run_cli,
)
from tests.functional.daemon_tools import (
    Background,
    child_env,
    frontend,
    only_frontend,
    ps,
    sim_daemon,
    until,
)
from tests.support.programs import run_daemon


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("access")
    certificate, key = make_certificate(folder)
    server = f'tls_cert = "{certificate}"\ntls_key = "{key}"'
    with sim_daemon(
        CONFIG, folder, MODELS, max_model_len=2048, frontends=2, server=server
    ) as daemon:
        yield Box(daemon, folder / "daemon", certificate, [])


def test_nobody_gets_in_before_there_is_a_key(box: Box) -> None:
    with box.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
    with box.daemon.client() as client:
        [warning] = [event for event in client.events() if event.kind == "no_api_key"]
        assert client.status().are_keys_required
    assert "gpupool key add" in warning.message


async def test_clients_are_refused_in_words_that_they_know(box: Box) -> None:
    key = box.add("words", models=("one",))
    for wrong in ("none", key[:-1] + ("a" if key[-1] != "a" else "b"), key + "a"):
        error = await refusal(box, wrong)
        assert isinstance(error, openai.AuthenticationError)
        assert error.code == "invalid_api_key"
    error = await refusal(box, key, model="two")
    assert isinstance(error, openai.NotFoundError)
    assert error.code == "model_not_found"
    async with box.api(key) as api:
        assert [model.id async for model in await api.models.list()] == ["one"]
    assert await answer(box, key) == 3
    asked: dict[str, Any] = {"max_tokens": 3, "messages": [{"role": "user", "content": PROMPT}]}
    with httpx.Client(base_url=box.daemon.http_url, verify=box.trust) as http:
        for text, model, status, kind in (
            (key, "one", 200, None),
            ("wrong", "one", 401, "authentication_error"),
            (key, "two", 404, "not_found_error"),
        ):
            body = asked | {"model": model}
            said = http.post("/v1/messages", json=body, headers={"x-api-key": text})
            assert said.status_code == status
            assert said.json().get("error", {}).get("type") == kind


async def test_use_is_counted_and_the_history_knows_whose_it_was(box: Box) -> None:
    key = box.add("counted")
    assert await answer(box, key, "two", 7) == 7
    until(lambda: box.key("counted").num_tokens > 7)
    known = box.key("counted")
    assert (known.num_requests, known.last_used_at is None) == (1, False)
    with box.daemon.client() as client:
        record = next(one for one in client.requests() if one.api_key == known.id)
    assert record.model == "two"
    assert known.num_tokens == record.num_prompt_tokens + record.num_output_tokens


async def test_streams_go_on_while_their_key_is_rotated_and_removed(box: Box) -> None:
    old = box.add("rotated")
    async with box.api(old) as api:
        stream = Background(api, "one", PROMPT, 60)
        await stream.started()
        with box.daemon.client() as client:
            graced = client.rotate_key("rotated", 600).text
            assert await answer(box, old) == await answer(box, graced) == 3
            new = client.rotate_key("rotated", 0).text
            box.texts.extend((graced, new))
            assert isinstance(await refusal(box, old), openai.AuthenticationError)
            assert isinstance(await refusal(box, graced), openai.AuthenticationError)
            assert await answer(box, new) == 3
            client.remove_key("rotated")
        assert isinstance(await refusal(box, new), openai.AuthenticationError)
        assert len((await stream.finished()).token_ids) == 60


async def test_tokens_are_paid_off_before_the_next_request(box: Box) -> None:
    key = box.add("tokens", tokens_per_minute=20)
    assert await answer(box, key, num_tokens=40) == 40
    error = await refusal(box, key)
    assert isinstance(error, openai.RateLimitError)
    assert error.code == "rate_limit_exceeded"
    assert 60 < float(error.response.headers["retry-after"]) < 200
    with box.daemon.client() as client:
        client.set_key("tokens", SetKeyRequest(tokens_per_minute=0))
    assert await answer(box, key) == 3


async def test_live_requests_of_a_key_are_bounded(box: Box) -> None:
    key = box.add("live", max_live=1)
    async with box.api(key) as api:
        stream = Background(api, "one", PROMPT, 400)
        await stream.started()
        error = await refusal(box, key, stream=True)
        assert isinstance(error, openai.RateLimitError)
        assert "This API key already has 1 requests" in error.message
        stream.leave()
    until(lambda: not ps(box.daemon).requests)
    assert isinstance(await refusal(box, key, n=2), openai.BadRequestError)
    until(lambda: not ps(box.daemon).requests)
    assert await answer(box, key) == 3


async def test_low_priority_is_refused_first_and_high_last(box: Box) -> None:
    low, normal, high = (box.add(f"of-{name}", priority=name) for name in ("low", "normal", "high"))
    async with box.api(normal) as api:
        streams = [Background(api, "two", PROMPT, 400) for _ in range(MAX_LIVE - 1)]
        for stream in streams:
            await stream.started()
        for key in (low, normal):
            assert isinstance(await refusal(box, key, "two"), openai.RateLimitError)
        assert await answer(box, high, "two") == 3
        assert await answer(box, low, "one") == 3
        for stream in streams:
            stream.leave()
    until(lambda: not ps(box.daemon).requests)


async def test_rates_hold_over_all_frontends_together(box: Box) -> None:
    """Each of them alone would let three requests in, and knows of its own tokens only."""
    key = box.add("shared", requests_per_minute=3)
    body = {"model": "one", "prompt": PROMPT}
    statuses: list[int] = []
    for number in (0, 1, 0, 1):
        # Two of them never reach an engine; they count as well.
        with only_frontend(box.daemon, number), box.http(key) as http:
            path = "/tokenize" if number else "/v1/completions"
            statuses.append(http.post(path, json=body).status_code)
    assert statuses == [200, 200, 200, 429]
    key = box.add("tokens-shared", tokens_per_minute=20)
    with only_frontend(box.daemon, 0):
        assert await answer(box, key, num_tokens=40) == 40
    with only_frontend(box.daemon, 1):
        assert isinstance(await refusal(box, key), openai.RateLimitError)
    assert (box.key("tokens-shared").tokens_left or 0) < 0


async def test_restarted_frontends_know_keys_and_what_they_have_left(box: Box) -> None:
    key = box.add("twice", requests_per_minute=2)
    assert [await answer(box, key) for _ in range(2)] == [3, 3]
    assert isinstance(await refusal(box, key), openai.RateLimitError)
    until(lambda: (box.key("twice").requests_left or 2.0) < 1)
    killed = [frontend(box.daemon, number) for number in range(2)]
    for one in killed:
        one.kill()
    until(lambda: not any(one.is_running() for one in killed), 30)
    until(lambda: is_mounted(box), 60)
    assert isinstance(await refusal(box, key), openai.RateLimitError)
    assert isinstance(await refusal(box, box.texts[0] + "x"), openai.AuthenticationError)


def is_mounted(box: Box) -> bool:
    """Return whether the frontend that is up answers requests for a model."""
    with box.daemon.client() as client:
        key = next((one for one in client.api_keys() if one.name == "probe"), None)
    text = box.add("probe") if key is None else next(t for t in box.texts if key.id in t)
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 1}
    with box.http(text) as http, contextlib.suppress(httpx.TransportError):
        return http.post("/v1/completions", json=body).status_code == 200
    return False


def test_command_line(box: Box) -> None:
    made = run_cli(box, "key", "add", "by-hand", "--model", "one", "--expires", "30d")
    assert made.exit_code == 0, made.stderr
    [text] = made.stdout.split()
    box.texts.append(text)
    assert "cannot be shown again" in made.stderr
    with box.http(text) as http:
        assert http.get("/v1/models/one").status_code == 200
    listed = run_cli(box, "key", "ls").stdout
    assert box.key("by-hand").id in listed
    assert text not in listed
    changed = run_cli(box, "key", "set", "by-hand", "--all-models", "--max-live", "3")
    assert changed.stderr == "by-hand: all models, priority normal, 3 live\n"
    rotated = run_cli(box, "key", "rotate", "by-hand")
    box.texts.append(rotated.stdout.strip())
    assert "the old one works until" in rotated.stderr
    ask_one = ("run", "one", PROMPT, "--max-tokens", "2")
    shown = run_cli(box, *ask_one, GPUPOOL_API_KEY=box.texts[-1])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.strip()
    refused = run_cli(box, *ask_one, GPUPOOL_API_KEY="")
    assert refused.exit_code == 5
    assert "GPUPOOL_API_KEY" in refused.stderr
    assert "needed" in run_cli(box, "status").stdout
    assert run_cli(box, "key", "rm", "by-hand").exit_code == 0
    gone = run_cli(box, "key", "rm", "by-hand")
    assert (gone.exit_code, "no API key is named" in gone.stderr) == (4, True)
    assert run_cli(box, "key", "add", "bad", "--model", "tow").exit_code == 4


# The admin socket

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
ADD = "POST /keys"


@needs_root
def test_strangers_are_told_what_to_do(box: Box) -> None:
    calls = ("GET /status", "GET /keys", ADD + ' {"name": "mine"}', "DELETE /models/one")
    answers = as_somebody(box, str(STRANGER), *calls)
    for said, group in zip(answers, [READERS, READERS, ADMINS, ADMINS], strict=True):
        assert said.startswith("403 ")
        assert f"the user {STRANGER} may not use the admin socket" in said
        assert f"usermod -aG {group.gr_name} {STRANGER}" in said


@needs_root
def test_readers_only_look(box: Box) -> None:
    calls = ("GET /keys", "GET /events?limit=1", ADD + ' {"name": "mine"}', "POST /check", "PUT /x")
    answers = as_somebody(box, f"{STRANGER},{READERS.gr_gid}", *calls)
    assert [one[:3] for one in answers] == ["200", "200", "403", "403", "403"]
    assert "may only read" in answers[2]
    with box.daemon.client() as client:
        assert "mine" not in [key.name for key in client.api_keys()]


@needs_root
def test_members_of_the_admin_group_do_everything(box: Box) -> None:
    [said] = as_somebody(box, f"{STRANGER},{ADMINS.gr_gid}", ADD + ' {"name": "members"}')
    status, _, body = said.partition(" ")
    assert status == "200", said
    box.texts.append(json.loads(body)["text"])


@needs_root
def test_command_line_tells_strangers_too(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = as_somebody(box, str(STRANGER), "GET /keys")[0].partition(" ")[2]
    response = httpx.Response(403, text=answered)

    def send(*_: object, **__: object) -> httpx.Response:
        return response

    monkeypatch.setattr(httpx.Client, "send", send)
    done = run_cli(box, "key", "ls")
    assert done.exit_code == 5
    assert "usermod -aG" in done.stderr


# At the end, when much has happened


async def test_no_key_and_no_prompt_is_anywhere(box: Box) -> None:
    key = box.add("leaks")
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 2}
    wrong: list[Any] = [
        {"max_tokens": -1},
        {"temperature": PROMPT},
        {"max_tokens": 10**9},
        {"prompt": PROMPT * 2000},
        {"prompt": [PROMPT, {"no": PROMPT}]},
        {"model": PROMPT},
        {"response_format": {"type": PROMPT}},
    ]
    with box.http(key) as http:
        for change in wrong:
            status = http.post("/v1/completions", json=body | change).status_code
            assert 400 <= status < 500, change
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
            http.post(path, json={"model": "one", "messages": PROMPT, "input": {"x": PROMPT}})
        http.post("/v1/completions", content=f'{{"prompt": "{PROMPT}"'.encode())
        http.get(f"/{PROMPT}", params={"key": key})
    async with box.api(key) as api:
        stream = Background(api, "one", PROMPT, 300)
        await stream.started()
        stream.leave()
    with box.daemon.client() as client:
        client.remove_key("leaks")
    until(lambda: not ps(box.daemon).requests)
    there = list(places(box))
    needles = [PROMPT.encode(), *(text.encode() for text in box.texts)]
    assert len(needles) > 10
    found = [(place, text[:12]) for place, data in there for text in needles if text in data]
    assert found == []
    # The public parts are there: what was looked at is what there is.
    ids = {place for place, data in there if key.split("_")[1].encode() in data}
    assert "/keys?revoked=true" in ids
    assert any(place.endswith("gpupool.db") or place.endswith("-wal") for place in ids)


def test_renewed_certificate_is_taken_while_serving(box: Box) -> None:
    def served() -> bytes:
        address = httpx.URL(box.daemon.http_url)
        pem = ssl.get_server_certificate((address.host, address.port or 0))
        return ssl.PEM_cert_to_DER_cert(pem)

    before = served()
    certificate, _ = make_certificate(box.certificate.parent)
    renewed = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    assert renewed != before
    until(lambda: served() == renewed)
    assert asyncio.run(answer(box, box.add("renewed"))) == 3


def test_daemon_without_a_usable_certificate_does_not_start(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path, "one")
    _, key = make_certificate(tmp_path, "two")
    config = tmp_path / "gpupool.toml"
    config.write_text(f"""
[server]
port = 0
tls_cert = "{certificate}"
tls_key = "{key}"

[paths]
state_dir = "{tmp_path}/state"
runtime_dir = "{tmp_path}/run"
""")
    daemon = run_daemon(["--config", str(config)], child_env())
    assert daemon.returncode == 2
    checked = CliRunner().invoke(app, ["config", "check", str(config)])
    assert checked.exit_code == 1
    for shown in (daemon.stderr, checked.output):
        assert "server.tls_key: " in shown
        assert "two.key is not the key of the certificate" in shown
