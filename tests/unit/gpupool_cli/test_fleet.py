"""Tests of ``gpupool fleet`` before operations that are written down here."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpupool_cli import output
from gpupool_cli.main import app
from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.fleet import operations
from gpupoold.fleet.cluster import FleetSpec, FleetTable, NodeMembership
from gpupoold.fleet.operations import EntranceOptions, FleetState
from tests.unit.fleet.fleets import model, node, spec

SOCKET = Path("/run/nowhere.sock")


def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, ["--socket", str(SOCKET), *arguments], env=env)


def membership(**changes: Any) -> NodeMembership:
    fields: dict[str, Any] = {"name": "east", "ip": "10.0.0.1", "ray_address": "10.0.0.1:6379"}
    return NodeMembership(**fields | {"is_head": True, "owns_ray": True} | changes)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (
        node("east", model("m", num_live=3, load=0.5)),
        node("west", model("m"), is_draining=True),
        node("north", model("theirs"), is_lost=True),
    )
    found = FleetState(
        FleetTable(1, "", nodes), {"m": spec("m", 2), "n": spec("n")}, {"n on east": "no room"}
    )
    monkeypatch.setattr(operations, "state", lambda path: found)
    watching = contextlib.nullcontext(lambda: found)
    monkeypatch.setattr(operations, "watching", lambda path: watching)


def test_status(state: None) -> None:
    done = run("fleet", "status")
    assert done.exit_code == 0
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.strip()}
    assert "ready" in lines["east"]
    assert "25%" in lines["east"]
    assert "draining" in lines["west"]
    assert "lost" in lines["north"]
    assert "east, west" in lines["m"]
    assert "waits for a node" in lines["n"] or "no room" in done.output
    assert "not placed by the fleet" in lines["theirs"]
    assert "n on east: no room" in done.output


def test_top_elsewhere_prints_once(state: None) -> None:
    done = run("fleet", "top")
    assert done.exit_code == 0
    assert done.output.count("NODE ") == 1
    assert "n on east: no room" in done.output


def test_top_on_a_terminal(state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    def look() -> list[str]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            raise KeyboardInterrupt
        return ["a line", "\x1b[31mhostile"]

    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    output.show_live(look, 0.01)
    assert num_looks == 3
    assert "a line" in shown.getvalue()
    assert "\x1b[31m" not in shown.getvalue()


def test_status_for_programs(state: None) -> None:
    found = json.loads(run("fleet", "status", "--json").stdout)
    assert [one["name"] for one in found["nodes"]] == ["east", "west", "north"]
    assert "secret" not in found["nodes"][0]["report"]
    assert found["models"]["m"]["least_replicas"] == 2


def test_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def up(*arguments: Any, **options: Any) -> NodeMembership:
        asked.append((arguments, options))
        return membership()

    monkeypatch.setattr(operations, "up", up)
    done = run("fleet", "up", "--name", "east", "--ip", "10.0.0.1", "--listen", "0.0.0.0:9000")
    assert done.exit_code == 0
    assert "gpupool fleet join 10.0.0.1:6379" in done.output
    entrance = EntranceOptions(host="0.0.0.0", port=9000, num_replicas=2, is_everywhere=False)
    assert asked == [((SOCKET, "east", "10.0.0.1", "", 6379, entrance), {"ray_address": None})]
    for wrong in ("9000", "host:", "host:0", "host:99999", "host:x"):
        assert run("fleet", "up", "--ip", "10.0.0.1", "--listen", wrong).exit_code == 2


def test_join_needs_the_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def join(path: Path, address: str, secret: str, *_: Any, **__: Any) -> NodeMembership:
        asked.append(secret)
        return membership()

    monkeypatch.setattr(operations, "join", join)
    join_it = ("fleet", "join", "10.0.0.1:6379", "--ip", "10.0.0.2")
    none = run(*join_it, env={"GPUPOOL_FLEET_SECRET": ""})
    assert none.exit_code == 2
    assert "secret" in none.output
    assert run(*join_it, env={"GPUPOOL_FLEET_SECRET": "from-variable\n"}).exit_code == 0
    (tmp_path / "secret").write_text("from-file\n")
    assert run(*join_it, "--secret-file", str(tmp_path / "secret")).exit_code == 0
    assert asked == ["from-variable", "from-file"]
    assert run(*join_it, "--secret-file", str(tmp_path / "nothing")).exit_code == 2


def test_models_and_keys_of_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[FleetSpec] = []
    keys: list[AddKeyRequest] = []
    removed: list[str] = []

    def add_key(path: Path, request: AddKeyRequest) -> str:
        keys.append(request)
        return "gpk_text"

    monkeypatch.setattr(operations, "add_model", lambda path, spec: specs.append(spec))
    monkeypatch.setattr(operations, "remove_model", lambda path, name: removed.append(name))
    monkeypatch.setattr(operations, "add_key", add_key)
    monkeypatch.setattr(operations, "remove_key", lambda path, name: removed.append(name))
    added = run("add-model", "m", "--source", "org/m", "--fleet", "--replicas", "2", "--ttft", "2s")
    assert added.exit_code == 0, added.output
    assert (specs[0].name, specs[0].least_replicas, specs[0].request.ttft_s) == ("m", 2, 2.0)
    assert run("add-model", "m", "--fleet", "--check").exit_code == 2
    key = run("key", "add", "web", "--fleet", "--model", "m")
    assert key.stdout.strip() == "gpk_text"
    assert keys[0].models == ("m",)
    assert json.loads(run("key", "add", "ui", "--fleet", "--json").stdout)["text"] == "gpk_text"
    assert run("key", "rm", "web", "--fleet").exit_code == 0
    changed: list[Any] = []
    monkeypatch.setattr(operations, "set_model", lambda path, *change: changed.append(change))
    assert run("fleet", "set", "m", "--ttft", "3s", "--replicas", "4").exit_code == 0
    assert changed == [("m", SetModelRequest(ttft_s=3.0), 4)]
    assert run("fleet", "set", "m").exit_code == 2
    assert run("fleet", "rm", "m").exit_code == 0
    assert removed == ["web", "m"]
