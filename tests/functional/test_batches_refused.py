"""Batches whose requests are refused: by a failed model, and because they end workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional import poison
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    cli,
    emulated_config,
    private_daemon,
    until,
)

_PATH = "/v1/completions"
_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def box(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A device with a model, a model that has failed, and requests that end workers."""
    plugin = tmp_path_factory.mktemp("plugin")
    poison.install(plugin)
    weights = tmp_path_factory.mktemp("models") / "bad"
    shutil.copytree(tiny_models[QWEN2], weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(plugin)
        config = emulated_config(2 * device_bytes)
        with private_daemon(config, tmp_path_factory.mktemp("box")) as daemon:
            daemon.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
            daemon.add_model("bad", weights, **LOAD_OPTIONS)
            with daemon.client() as client:
                client.unload("bad", "drain")
            (weights / "model.safetensors").unlink()
            yield daemon


@pytest.fixture
def http(box: PrivateDaemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=box.http_url, timeout=60) as client:
        yield client


def begin(http: httpx.Client, bodies: Iterable[dict[str, Any]]) -> str:
    """Begin a batch; return its id."""
    requests = (
        {"custom_id": str(number), "method": "POST", "url": _PATH, "body": body}
        for number, body in enumerate(bodies)
    )
    lines = "\n".join(map(json.dumps, requests))
    file = http.post("/v1/files", files={"file": ("in", lines)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": _PATH, "completion_window": "24h"}
    return str(http.post("/v1/batches", json=asked).json()["id"])


def batch(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/batches/{batch_id}").json()
    return found


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "x", "max_tokens": 2} | fields


def test_a_failed_model_stops_no_other_batch_and_the_owner_is_told(
    box: PrivateDaemon, http: httpx.Client
) -> None:
    until(lambda: "failed" in http.post(_PATH, json=body("bad")).text, _TIMEOUT_S)
    stuck = begin(http, [body("bad")] * 100)
    until(lambda: batch(http, stuck)["status_details"] is not None, _TIMEOUT_S)
    other = begin(http, [body(LLAMA)] * 2)
    until(lambda: batch(http, other)["status"] == "completed", _TIMEOUT_S)
    waits = batch(http, stuck)
    assert waits["status"] == "in_progress"
    assert waits["request_counts"] == {"total": 100, "completed": 0, "failed": 0}
    assert "bad" in waits["status_details"]["reason"]
    assert waits["status_details"]["next_try_at"] > waits["created_at"]
    with box.client() as client:
        [event] = [one for one in client.events() if one.kind == "batch_waits"]
        assert stuck in event.message
        [shown] = client.batches(10)
    assert (shown.id, shown.models, shown.state) == (stuck, ["bad"], "in_progress")
    assert shown.reason == waits["status_details"]["reason"]
    assert stuck in cli(box, "batches").stdout
    [as_json] = json.loads(cli(box, "batches", "--json").stdout)
    assert as_json["num_requests"] == 100
    both = json.loads(cli(box, "batches", "--json", "--all").stdout)
    assert {one["id"] for one in both} == {other, stuck}  # perhaps of the same second
    http.post(f"/v1/batches/{stuck}/cancel")
    until(lambda: batch(http, stuck)["status"] == "cancelled", _TIMEOUT_S)
    assert batch(http, stuck)["status_details"] is None


def test_a_request_that_ends_workers_is_asked_once(box: PrivateDaemon, http: httpx.Client) -> None:
    def num_events(kind: str) -> int:
        with box.client() as client:
            return sum(one.kind == kind for one in client.events(limit=1000))

    before = num_events("worker_down")
    poisoned = begin(http, [body(LLAMA), body(LLAMA, seed=poison.STEP_SEED, max_tokens=20)])
    until(lambda: batch(http, poisoned)["status"] == "completed", _TIMEOUT_S)
    ended = batch(http, poisoned)
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    line = json.loads(http.get(f"/v1/files/{ended['error_file_id']}/content").text)
    assert line["response"]["status_code"] == 422
    assert line["response"]["body"]["error"]["code"] == "request_crashed_worker"
    assert num_events("request_convicted") == 1
    # Twice, and again for each end beside which something else was under way, as a load.
    assert 2 <= num_events("worker_down") - before <= 4
