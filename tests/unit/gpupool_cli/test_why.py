"""``why``: a live request, a model, a request that has ended."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpupoold.api.schemas_explain import (
    DeviceTurns,
    FinishedWhy,
    ModelOnDevice,
    ModelWhy,
    RequestWhy,
    Why,
)
from gpupoold.domain import Event, WaitingTurn
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon
from tests.unit.gpupool_cli.test_history import RECORD, span

GIB = 1024**3
DEVICE = DeviceTurns(
    device=1,
    on_turn="llama",
    rule="deadline",
    why="turns go in the order of their deadlines",
    used_s=1.5,
    left_s=0.5,
    line=[
        WaitingTurn(
            model="qwen",
            rule="put-off",
            why="not all can be in time",
            starts_in_s=0.5,
            duration_s=None,
            num_requests=3,
        )
    ],
    num_waiting_for_kv=2,
)
REQUEST = RequestWhy(
    request_id="cmpl-1",
    model="qwen",
    standing="paused",
    text="is paused on device 1 until the next turn of qwen",
    device=1,
    rule="resident",
    why="that one has its weights",
    num_before=0,
    age_s=4.0,
    num_prompt_tokens=12,
    num_output_tokens=30,
    next_deadline_in_s=-0.25,
    next_token_in_s=0.75,
    late_s=0.0,
    turns=DEVICE,
)
PLACE = ModelOnDevice(
    device=1,
    weights_resident_bytes=4 * GIB,
    weights_total_bytes=16 * GIB,
    kv_resident_bytes=0,
    kv_host_bytes=0,
    num_requests=3,
    turns=DEVICE,
)
MODEL = ModelWhy(
    name="qwen",
    state="ready",
    text="ready: 3 live requests",
    ttft_s=10.0,
    tbt_s=0.1,
    attainment_1m=0.5,
    hour=span(),
    cached_bytes=16 * GIB,
    weight_bytes=16 * GIB,
    standings={"paused": 2, "kv-room": 1},
    devices=[PLACE],
    prompt_tokens=256,
    first_token_in_s=1.5,
    main_cause="queueing",
    advice=["requests waited for other models' turns"],
)


def said(cli: Cli, name: str) -> str:
    result = cli("why", name)
    assert result.exit_code == 0
    return result.stdout


def test_a_live_request(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.whys["cmpl-1"] = Why(request=REQUEST)
    text = said(cli, "cmpl-1")
    assert "state       is paused on device 1 until the next turn of qwen\n" in text
    assert "next token  late by 250ms; expected in about 750ms\n" in text
    assert "device      1: that one has its weights\n" in text
    assert "device 1: llama on turn for 1.5s, 500ms left: turns go in the order" in text
    assert "2 requests wait for KV memory\n" in text
    assert text.splitlines()[-1].split()[:6] == ["1", "qwen", "3", "500ms", "-", "put-off"]
    assert json.loads(cli("why", "cmpl-1", "--json").stdout)["request"]["rule"] == "resident"


def test_a_request_of_which_little_is_known(daemon: FakeDaemon, cli: Cli) -> None:
    bare = {"device": None, "rule": None, "why": None, "turns": None, "next_token_in_s": None}
    some = {"num_before": 2, "text": "waits until qwen is in host memory"}
    daemon.whys["r"] = Why(request=REQUEST.model_copy(update=bare | some))
    text = said(cli, "r")
    assert "waits until qwen is in host memory; 2 requests ahead\n" in text
    assert "expected after the wait above\n" in text
    assert "device" not in text


def test_a_model(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.whys["qwen"] = Why(model=MODEL)
    text = said(cli, "qwen")
    assert "targets        TTFT 10s, TBT 100ms\n" in text
    assert "last minute    50.0 % of tokens in time\n" in text
    assert "last hour      95.0 % of 100 tokens in time\n" in text
    assert "lateness       queueing 3.5s, switching 250ms\n" in text
    assert "weights        device 1 (25 % of the weights), host memory (16 GiB)\n" in text
    assert "live requests  1 kv-room, 2 paused\n" in text
    assert "in about 1.5s (prompt of 256)\n" in text
    assert "hint: requests waited for other models' turns\n" in text
    assert "prefix cache" not in text


def test_kv_of_ended_requests(daemon: FakeDaemon, cli: Cli) -> None:
    kept = {"prefix_saved_bytes": 3 * GIB, "prefix_hit_bytes": GIB}
    places = [PLACE.model_copy(update=kept | {"device": number}) for number in range(2)]
    daemon.whys["qwen"] = Why(model=MODEL.model_copy(update={"devices": places}))
    expected = (
        "prefix cache   6 GiB of KV of ended requests saved to host memory, 2 GiB used again\n"
    )
    assert expected in said(cli, "qwen")


def test_kv_from_other_devices_and_files(daemon: FakeDaemon, cli: Cli) -> None:
    kept = {"prefix_hit_bytes": 3 * GIB, "prefix_peer_bytes": GIB, "prefix_file_bytes": GIB // 2}
    places = [PLACE.model_copy(update=kept)]
    daemon.whys["qwen"] = Why(model=MODEL.model_copy(update={"devices": places}))
    text = said(cli, "qwen")
    assert "3 GiB used again, 1 GiB from another device's memory, 512 MiB from files\n" in text


@pytest.mark.parametrize(("attainment", "is_normal"), [(0.99, True), (0.8, False), (None, False)])
def test_pauses_are_explained_where_the_tokens_are_in_time(
    daemon: FakeDaemon, cli: Cli, attainment: float | None, is_normal: bool
) -> None:
    hour = replace(MODEL.hour, tbt_p99_s=1.0, attainment=attainment)
    daemon.whys["qwen"] = Why(model=MODEL.model_copy(update={"hour": hour}))
    shown = said(cli, "qwen")
    assert ("a TBT p99 above the target is normal where models take turns" in shown) == is_normal
    assert "paced gaps" not in shown


def test_a_model_that_is_nowhere(daemon: FakeDaemon, cli: Cli) -> None:
    nowhere = PLACE.model_copy(
        update={
            "weights_resident_bytes": 0,
            "turns": DEVICE.model_copy(
                update={"on_turn": None, "line": [], "num_waiting_for_kv": 0}
            ),
        }
    )
    update = {"cached_bytes": 0, "devices": [nowhere], "standings": {}, "first_token_in_s": None}
    daemon.whys["qwen"] = Why(model=MODEL.model_copy(update=update))
    text = said(cli, "qwen")
    assert "weights      nowhere; the next request loads the weights\n" in text
    assert "first token expected when a device has the model\n" in text
    assert "live requests  " not in text
    assert text.endswith("\ndevice 1: idle\n")


def test_a_request_that_has_ended(daemon: FakeDaemon, cli: Cli) -> None:
    event = Event(
        id=1, at=samples.AT, level="error", kind="worker_died", subject="qwen", message="signal 9"
    )
    ended = FinishedWhy(request=RECORD, device=0, text="it failed", events=[event])
    daemon.whys["cmpl-1"] = Why(finished=ended)
    text = said(cli, "cmpl-1")
    assert "state           has ended: it failed\n" in text
    assert text.splitlines()[-1].endswith("error worker_died: signal 9")


def test_nothing_of_that_name(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("why", "nobody")
    assert result.exit_code == 4
    assert "neither a model nor a request is named 'nobody'" in result.stderr


@pytest.mark.parametrize(
    ("num_gpus", "gpus", "name"),
    [
        (1, (0,), "device 1: llama"),
        (2, (2, 3), "device 1 (GPUs 2, 3): llama"),
        (4, (), "device 1 (4 GPUs): llama"),
    ],
)
def test_the_gpus_of_a_group_are_named(
    num_gpus: int, gpus: tuple[int, ...], name: str, daemon: FakeDaemon, cli: Cli
) -> None:
    turns = DEVICE.model_copy(update={"num_gpus": num_gpus, "gpus": gpus})
    daemon.whys["cmpl-1"] = Why(request=REQUEST.model_copy(update={"turns": turns}))
    assert name in cli("why", "cmpl-1").stdout
