"""A loaded box of simulated devices explains itself; what was is in its history."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupool_state import DATABASE_NAME
from gpupoold.api.schemas_explain import RequestWhy, SpanInfo
from gpupoold.errors import NoSuchModel, UsageError
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.wait_estimate import Standing
from tests.functional.daemon_tools import (
    Background,
    api_client,
    ask,
    cli,
    eventually,
    ps,
    sim_daemon,
    until,
)
from tests.functional.metrics_tools import value

MODELS = ("one", "two")
# Room for one of the two, and time for both.
CONFIG = """
[[device]]
kind = "sim"
gpu = "A10"

[memory]
model_cache = 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("box")


@pytest.fixture(scope="module")
def box(folder: Path) -> Iterator[PrivateDaemon]:
    with sim_daemon(CONFIG, folder, MODELS, ttft_s=8.0, tbt_s=0.2) as daemon:
        yield daemon


def whys(box: PrivateDaemon) -> list[RequestWhy]:
    """Of all live requests."""
    with box.client() as client:
        found = [client.why(one.request_id).request for one in client.ps().requests]
    return [one for one in found if one is not None]


def standings(box: PrivateDaemon) -> set[str]:
    return {one.standing for one in whys(box)}


def test_requests_of_two_models_on_one_device(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            streams = [Background(api, name, "a long story", 900) for name in MODELS * 3]
            await eventually(lambda: len(ps(box).requests) == 6)
            await eventually(lambda: {Standing.ON_TURN, Standing.WAITS_FOR_TURN} <= standings(box))
            await asyncio.to_thread(look)
            # A turn later the first are paused.
            await eventually(lambda: Standing.PAUSED in standings(box))
            for stream in streams:
                stream.leave()

    def look() -> None:
        found = whys(box)
        assert {one.rule for one in found} <= {Rule.ONLY_DEVICE, Rule.SERVED_THERE}
        for one in found:
            assert one.turns is not None
            assert one.next_token_in_s is not None
            in_line = {place.model for place in one.turns.line}
            assert (one.model in in_line) == (one.turns.on_turn != one.model)
            assert one.turns.rule in set(Rule)
        with box.client() as client, pytest.raises(UsageError, match="6 live requests have"):
            client.why("cmpl-")

    asyncio.run(run())


def test_a_model_is_told_of_with_its_targets_and_its_place(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            await ask(api, "one", "x", 30)

    asyncio.run(run())
    with box.client() as client:
        model = client.why("one").model
        usage = client.model("one").usage
    assert model is not None
    assert usage is not None
    assert (model.ttft_s, model.tbt_s) == (8.0, 0.2)
    assert model.hour.tokens >= 30
    assert usage.attainment_1h == model.hour.attainment
    assert len(usage.attainment_minutes) == 60
    assert model.devices[0].weights_resident_bytes > 0
    shown = cli(box, "why", "one")
    assert "targets      TTFT 8s, TBT 200ms" in shown.stdout
    assert shown.returncode == 0, shown.stderr


def test_a_request_that_has_ended_is_told_of_from_the_history(box: PrivateDaemon) -> None:
    async def finish_one() -> None:
        async with api_client(box.http_url) as api:
            await ask(api, "one", "a short story", 5)

    asyncio.run(finish_one())
    with box.client() as client:
        [latest] = client.past_requests("one", limit=1)
        finished = client.why(latest.request_id).finished
        assert finished is not None
        assert finished.request == latest
        assert "reached max_tokens or the model's context length" in finished.text
        part = latest.request_id[5:20]
        assert client.why(part).finished == finished
        with pytest.raises(NoSuchModel, match="'nothing'"):
            client.why("nothing")


CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "n": 2},
    "/v1/completions": {"prompt": ["x", "y"]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", CALLS)
def test_a_request_is_found_by_the_ids_that_its_client_saw(box: PrivateDaemon, path: str) -> None:
    num_requests = 2 if "completions" in path else 1
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "one", limit: 20, **CALLS[path]}
    answer = httpx.post(box.http_url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    for seen in (answer.json()["id"], answer.headers["x-request-id"]):
        with box.client() as client:
            found = client.past_requests(request_id=seen)
            assert len(found) == num_requests, seen
            finished = client.why(seen).finished
        assert finished is not None
        assert finished.request in found
        shown = cli(box, "history", "--id", seen)
        assert [line.split()[2] for line in shown.stdout.splitlines()[1:]] == [
            one.request_id for one in found
        ]


def test_a_client_cancels_all_samples_by_the_id_of_a_chunk(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            stream = await api.chat.completions.create(
                model="one",
                messages=[{"role": "user", "content": "x"}],
                max_completion_tokens=900,
                n=3,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunk = await anext(aiter(stream))
            live = {one.request_id for one in ps(box).requests}
            with box.client() as client:
                why = client.why(chunk.id).request
                assert why is not None
                assert {why.request_id, *why.also_live} == live
                shown = await asyncio.to_thread(cli, box, "cancel", chunk.id)
            assert "and 2 more of its client: cancelled" in shown.stderr
            await eventually(lambda: not ps(box).requests)
            with pytest.raises(openai.APIError, match="cancelled by the operator"):
                async for _ in stream:
                    pass

    asyncio.run(run())


def test_switches_can_be_filtered(box: PrivateDaemon) -> None:
    with box.client() as client:
        all_of_them = client.switches(1000)
        of_two = client.switches(1000, model="two")
        slowest = client.switches(1000, order="slowest")
        assert of_two == [one for one in all_of_them if one.model == "two"]
        assert [one.total_s for one in slowest] == sorted(
            (one.total_s for one in all_of_them), reverse=True
        )
        assert client.switches(1000, device=1) == []
        assert client.switches(1000, device=0) == all_of_them
        assert client.switches(1000, since_s=1e-3) == []


@pytest.mark.slow
def test_stages_make_up_the_times_to_and_between_tokens(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            await asyncio.gather(*(ask(api, name, "a tale", 200) for name in MODELS * 2))

    asyncio.run(run())
    until(lambda: not ps(box).requests)
    with box.client() as client:
        sums = {one.model: one for one in client.history_by_model()}
        spans = client.history()
    assert set(sums) == set(MODELS)
    assert sum(one.first_tokens for one in sums.values()) == sum(one.first_tokens for one in spans)
    for phase, latency in (("first_token", "time_to_first"), ("between_tokens", "time_between")):
        name = f"gpupool_{latency}_token{'s' * (phase == 'between_tokens')}_seconds_sum"
        of_model = {one.model: getattr(one, phase) for one in sums.values()}
        for model, stages in of_model.items():
            expected = value(box, name, model=model)
            assert stages.total_s == pytest.approx(expected, rel=1e-6)
            exported = value(box, "gpupool_request_stage_seconds_total", model=model, phase=phase)
            assert exported == pytest.approx(expected, rel=1e-6)
            assert min(stages.by_name().values()) >= 0.0
        # One model fits: the other waits, and is brought in.
        assert sum(one.queueing_s for one in of_model.values()) > 0.0
        assert sum(one.switching_s for one in of_model.values()) > 0.0
        in_spans = [getattr(one, phase).total_s for one in spans]
        assert sum(in_spans) == pytest.approx(sum(one.total_s for one in of_model.values()))
    shown = cli(box, "history", "--breakdown")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "MODEL",
        *(name for name in sorted(MODELS) for _ in range(2)),
    ]


def totals(spans: list[SpanInfo]) -> tuple[int, int, int]:
    return (
        sum(one.requests for one in spans),
        sum(one.tokens for one in spans),
        sum(one.completed + one.aborted + one.failed for one in spans),
    )


def test_the_doctor_finds_no_fault(box: PrivateDaemon, folder: Path) -> None:
    config = folder / "daemon" / "gpupool.toml"
    done = cli(box, "doctor", "--json")
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    assert checks["daemon"]["verdict"] == checks["books"]["verdict"] == "ok"
    assert checks["open files"]["found"].endswith("(the daemon)")
    assert checks["config"]["found"] == f"{config} is valid"
    assert checks["folder log_dir"]["found"].startswith(str(folder))


def test_history_outlives_the_daemon(box: PrivateDaemon, folder: Path) -> None:
    with box.client() as client:
        until(lambda: not client.ps().requests)
        before = {name: totals(client.history(name)) for name in MODELS}
        assert totals(client.history()) == tuple(map(sum, zip(*before.values(), strict=True)))
        counted = {one.name: (one.requests, one.tokens) for one in client.ps().models}
    assert {name: found[:2] for name, found in before.items()} == counted
    assert all(requests == ended > 0 for requests, _, ended in before.values())
    box.process.terminate()
    box.process.wait(30)
    database = next(folder.rglob(DATABASE_NAME))
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT model, sum(requests), sum(tokens) FROM slo_minutes GROUP BY model"
        ).fetchall()
        minutes = connection.execute(
            "SELECT ttft, tbt, first_token_loading_s + first_token_queueing_s "
            "+ first_token_switching_s + first_token_kv_s + first_token_computing_s, "
            "between_tokens_loading_s + between_tokens_queueing_s + between_tokens_switching_s "
            "+ between_tokens_kv_s + between_tokens_computing_s FROM slo_minutes"
        ).fetchall()
    assert {name: (requests, tokens) for name, requests, tokens in rows} == counted
    for ttft, tbt, first_token_s, between_tokens_s in minutes:
        assert first_token_s == pytest.approx(json.loads(ttft)[0], abs=1e-6)
        assert between_tokens_s == pytest.approx(json.loads(tbt)[0], abs=1e-6)
