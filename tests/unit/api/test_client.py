"""The admin client against real sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse, PlainTextResponse

from gpupoold.api.client import AdminClient, split_lines
from gpupoold.api.schemas_models import AddModelRequest, SetModelRequest
from gpupoold.errors import (
    DaemonNotRunning,
    Failed,
    NoSuchModel,
    NoSuchRequest,
    Refused,
    TimedOut,
    Unavailable,
    UsageError,
)
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def test_reading(daemon: FakeDaemon, client: AdminClient) -> None:
    model = daemon.add("org/a b?#%", aliases=("a",))
    daemon.switches = [samples.switch("a", None)]
    assert client.status().state == "ready"
    assert client.models() == [model]
    assert client.model("org/a b?#%") == client.model("a") == model
    assert client.ps().models[0].name == model.name
    assert client.switches(limit=5) == daemon.switches


def test_adding_is_a_stream_that_ends_with_the_model(
    daemon: FakeDaemon, client: AdminClient
) -> None:
    lines = list(client.add_model(AddModelRequest(name="q")))
    stages = list(dict.fromkeys(line.stage for line in lines))
    assert stages == ["resolve", "download", "check", "load", "ready"]
    assert lines[-1].model == daemon.models["q"]
    assert all(line.model is None for line in lines[:-1])


def test_an_error_in_the_stream_is_raised(client: AdminClient) -> None:
    with pytest.raises(Failed, match="no such repository") as caught:
        list(client.add_model(AddModelRequest(name="q", source="missing/repo")))
    assert caught.value.hint == "check --source"


def test_a_stream_without_a_result_is_a_failure(client: AdminClient) -> None:
    with pytest.raises(Failed, match="without a result"):
        list(client.add_model(AddModelRequest(name="q", source="breaks-off")))


def test_an_error_instead_of_a_stream_is_raised(daemon: FakeDaemon, client: AdminClient) -> None:
    daemon.add("q")
    with pytest.raises(Refused, match="exists"):
        next(client.add_model(AddModelRequest(name="q")))


def test_changing_and_removing(daemon: FakeDaemon, client: AdminClient) -> None:
    daemon.add("q", aliases=("a",))
    changed = client.set_model("a", SetModelRequest(ttft_s=2.0, add_aliases=["b"]))
    assert (changed.ttft_s, changed.tbt_s, changed.aliases) == (2.0, 0.1, ("a", "b"))
    daemon.live["q"] = 1
    with pytest.raises(Refused):
        client.remove_model("b")
    assert client.remove_model("b", "force") == changed
    with pytest.raises(NoSuchModel, match="'q'"):
        client.remove_model("q")


def test_the_cache(daemon: FakeDaemon, client: AdminClient) -> None:
    daemon.add("org/a b?#%")
    daemon.add("q", aliases=("chat",))
    assert [model.name for model in client.cache().models] == ["org/a b?#%", "q"]
    assert client.pin("org/a b?#%").is_pinned
    assert [model.is_pinned for model in client.cache().models] == [True, False]
    assert not client.pin("org/a b?#%", is_pinned=False).is_pinned
    assert client.drop_snapshot("chat").state == "disk"
    assert client.warm("chat").state == "host"
    daemon.live["q"] = 1
    with pytest.raises(Refused, match="q has live requests"):
        client.drop_snapshot("chat")
    with pytest.raises(NoSuchModel):
        client.warm("nobody")


def test_roles_and_drains(daemon: FakeDaemon, client: AdminClient) -> None:
    device = client.set_role(0, "decode")
    assert (device.role, device.is_role_fixed) == ("decode", True)
    device = client.set_role(0, "auto")
    assert (device.role, device.is_role_fixed) == ("decode", False)
    assert client.drain(0).is_draining
    assert client.ps().devices[0].is_draining
    assert not client.undrain(0).is_draining
    daemon.live["q"] = 2
    with pytest.raises(TimedOut, match="still has 2 requests"):
        client.drain(0)
    with pytest.raises(UsageError, match="no device 3"):
        client.set_role(3, "mixed")


def test_top_and_turns(daemon: FakeDaemon, client: AdminClient) -> None:
    daemon.add("q")
    daemon.turns = [samples.turn(number, "q") for number in range(1, 6)]
    daemon.tell("event 1")
    seen = client.top(turns_after=2)
    assert [turn.id for turn in seen.turns] == [3, 4, 5]
    assert (seen.last_turn_id, seen.last_event_id) == (5, 1)
    assert [row.usage.name for row in seen.models] == ["q"]
    assert [turn.id for turn in client.top(turns=1, minutes=False).turns] == [5]
    assert client.top(turns_after=5, events_after=1).events == []
    assert client.turns(after=1, limit=2) == daemon.turns[-2:]


def test_unloading_and_cancelling(daemon: FakeDaemon, client: AdminClient) -> None:
    daemon.add("org/a b?#%")
    daemon.live["org/a b?#%"] = 1
    with pytest.raises(Refused, match="live requests"):
        client.unload("org/a b?#%")
    assert client.unload("org/a b?#%", "drain").host_bytes
    assert client.unload("org/a b?#%", "force", keep_host=True).host_bytes == 0
    assert daemon.unloads == [("org/a b?#%", "drain", False), ("org/a b?#%", "force", True)]
    daemon.live_requests = [samples.live_request("cmpl-1/a", "q")]
    assert client.cancel("cmpl-1/a").num_output_tokens == 20
    with pytest.raises(NoSuchRequest, match="cmpl-1/a"):
        client.cancel("cmpl-1/a")


def test_events_latest_after_and_followed(daemon: FakeDaemon, client: AdminClient) -> None:
    for number in range(1, 6):
        daemon.tell(f"event {number}")
    assert [event.id for event in client.events(limit=2)] == [4, 5]
    assert [event.id for event in client.events(after=1, limit=2)] == [2, 3]
    stream = client.follow_events(after=4)
    assert next(stream).id == 5
    daemon.tell("event 6")
    assert next(stream).id == 6


def test_a_stream_that_is_not_read_to_its_end_leaves_the_client_usable(
    daemon: FakeDaemon, client: AdminClient
) -> None:
    for _ in range(20):
        assert next(client.logs(lines=1, follow=True)).line == "three"
    assert client.status().state == "ready"


def test_log_lines_keep_unusual_separators(daemon: FakeDaemon, client: AdminClient) -> None:
    daemon.log_lines = ["a\u2028b\u0085c", "", "d"]
    assert [one.line for one in client.logs()] == ["a\u2028b\u0085c", "", "d"]


def test_operations_answer_anything(client: AdminClient) -> None:
    answer = client.operate(2, "bench_kv", {"models": ("a", "b"), "rounds": 3})
    arguments = {"models": ["a", "b"], "rounds": 3}
    assert answer == {"number": 2, "operation": "bench_kv", "arguments": arguments}


def test_no_socket(socket_path: Path) -> None:
    with AdminClient(socket_path) as client, pytest.raises(DaemonNotRunning) as caught:
        client.status()
    assert str(socket_path) in caught.value.message
    assert "`gpupoold` or `systemctl start gpupoold`" in caught.value.hint


def test_too_many_callers_are_not_taken_for_no_daemon(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting:
        full.bind(str(socket_path))
        full.listen(0)
        waiting.connect(str(socket_path))
        with AdminClient(socket_path, timeout_s=0.1) as client, pytest.raises(Unavailable):
            client.status()


def test_a_socket_that_nobody_listens_to(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(socket_path))
    with AdminClient(socket_path) as client, pytest.raises(DaemonNotRunning):
        list(client.logs())


def test_a_proxy_in_the_environment_is_not_asked(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with AdminClient(daemon.socket_path) as client:
        assert client.status().state == "ready"


def test_a_socket_that_may_not_be_opened(daemon: FakeDaemon) -> None:
    daemon.socket_path.chmod(0)
    code = (
        "import os, sys\n"
        "from gpupoold.api.client import AdminClient\n"
        "from gpupoold.errors import Refused\n"
        "client = AdminClient(sys.argv[1])\n"
        "os.setuid(65534) if os.geteuid() == 0 else None  # root may open every socket\n"
        "try:\n"
        "    client.status()\n"
        "except Refused as error:\n"
        "    print(error.message)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(daemon.socket_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == f"no permission to open the admin socket {daemon.socket_path}\n"


def test_a_slow_answer_times_out(daemon: FakeDaemon) -> None:
    daemon.delay_s = 3.0
    with AdminClient(daemon.socket_path, timeout_s=0.1) as client, pytest.raises(TimedOut):
        client.status()


def test_a_connection_that_breaks_is_a_failure(daemon: FakeDaemon, client: AdminClient) -> None:
    stream = client.logs(lines=1, follow=True)
    assert next(stream).line == "three"
    daemon.stop_admin()
    with pytest.raises((Failed, StopIteration)):
        next(stream)
    with pytest.raises(DaemonNotRunning):
        client.status()


def test_unavailable_says_when_to_ask_again(daemon: FakeDaemon, client: AdminClient) -> None:
    body = {"error": {"code": "unavailable", "message": "starting", "hint": ""}}
    daemon.raw_answer = JSONResponse(body, 503, {"Retry-After": "7"})
    with pytest.raises(Unavailable) as caught:
        client.status()
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize(
    "answer",
    [
        PlainTextResponse("Internal Server Error", 500),
        JSONResponse({"detail": "Not Found"}, 404),
        JSONResponse(["error"], 500),
        JSONResponse({"error": "a string"}, 500),
    ],
)
def test_an_error_outside_the_contract(
    daemon: FakeDaemon, client: AdminClient, answer: PlainTextResponse
) -> None:
    daemon.raw_answer = answer
    with pytest.raises(Failed, match=f"GET /status was answered with HTTP {answer.status_code}"):
        client.status()


def test_an_answer_of_another_version(daemon: FakeDaemon, client: AdminClient) -> None:
    status = json.loads(samples.status("http://h", 0, "ready").model_dump_json())
    daemon.raw_answer = JSONResponse(status | {"new_field": 1})
    with pytest.raises(Failed, match="new_field") as caught:
        client.status()
    assert "versions" in caught.value.hint


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([], []),
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\r", b"\nc"], [b"ab", b"c"]),
        ([b"\n\n"], [b"", b""]),
        (["é\u2028ü".encode()[:3], "é\u2028ü".encode()[3:]], ["é\u2028ü".encode()]),
    ],
)
def test_split_lines(chunks: list[bytes], lines: list[bytes]) -> None:
    assert list(split_lines(chunks)) == lines
