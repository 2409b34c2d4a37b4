"""The command line builds a fleet of three nodes on Ray, with simulated devices."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.fleet import cluster
from tests.conftest import PYTHON_PATH
from tests.functional.daemon_tools import SIM_SHAPE, free_port, private_daemon, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install 'gpupool[fleet]'",
    ),
]

# Each node has a loopback address of its own.
ADDRESSES = {"east": "127.0.0.2", "west": "127.0.0.3", "north": "127.0.0.4"}
CONFIG = '[[device]]\nkind = "sim"\ngpu = "H800"\n'
STARTED_S = 120.0


class Box:
    """Three daemons, and the command line on each of their machines."""

    def __init__(self, daemons: dict[str, PrivateDaemon]) -> None:
        self.daemons = daemons
        self.ray_port, self.http_port = free_port(), free_port()
        self.url = f"http://{ADDRESSES['east']}:{self.http_port}"
        self.secret = ""

    def run(self, node: str, *arguments: str, secret: str = "") -> subprocess.CompletedProcess[str]:
        socket_path = str(self.daemons[node].socket_path)
        return subprocess.run(
            [sys.executable, "-m", "gpupool_cli.main", "--socket", socket_path, *arguments],
            env=os.environ | {"PYTHONPATH": PYTHON_PATH, "GPUPOOL_FLEET_SECRET": secret},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def fleet(self, node: str, *arguments: str) -> str:
        done = self.run(node, "fleet", *arguments, secret=self.secret)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self) -> None:
        address = ADDRESSES["east"]
        self.fleet(
            "east",
            *("up", "--name", "east", "--ip", address, "--port", str(self.ray_port)),
            *("--listen", f"{address}:{self.http_port}", "--replicas", "1"),
        )
        self.secret = self.fleet("east", "secret").strip()

    def join(self, node: str) -> None:
        address = f"{ADDRESSES['east']}:{self.ray_port}"
        self.fleet(node, "join", address, "--name", node, "--ip", ADDRESSES[node])

    def homes(self, model: str) -> list[str]:
        nodes = json.loads(self.fleet("east", "status", "--json"))["nodes"]
        return [
            node["name"]
            for node in nodes
            if not node["is_lost"]
            and any(
                one["name"] == model and one["state"] == "ready" for one in node["report"]["models"]
            )
        ]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with contextlib.ExitStack() as stack:
        daemons = {
            name: stack.enter_context(private_daemon(CONFIG, tmp_path_factory.mktemp(name)))
            for name in ADDRESSES
        }
        box = Box(daemons)
        try:
            box.up()
            for name in ("west", "north"):
                box.join(name)
            yield box
        finally:
            for name in reversed(ADDRESSES):
                box.run(name, "fleet", "leave")
                cluster.stop_ray(ADDRESSES[name])  # of a killed daemon


def test_a_fleet(box: Box, tmp_path: Path) -> None:
    refused = box.run("west", "fleet", "join", "127.0.0.2:1", secret=box.secret)
    assert refused.returncode != 0
    assert "in the fleet" in refused.stderr
    source = make_dummy_checkpoint(tmp_path, SIM_SHAPE)
    for name, replicas in (("one", "2"), ("two", "1")):
        added = ("add-model", name, "--source", str(source), "--fleet", "--replicas", replicas)
        assert box.run("west", *added).returncode == 0
    until(lambda: len(box.homes("one")) == 2 and len(box.homes("two")) == 1, STARTED_S)
    with httpx.Client(base_url=box.url, timeout=60) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["one", "two"]
        body = {"model": "two", "prompt": "Tell me", "max_tokens": 4}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        (home,) = box.homes("two")
        assert answer.headers["x-gpupool-node"] == home

        # The node of the second model dies; the fleet places the model anew.
        doomed = next(one for one in ("west", "north") if one in box.homes("one"))
        for process in descendants(box.daemons[doomed]):
            process.kill()
        box.daemons[doomed].process.kill()
        body["model"] = "one"
        for _ in range(5):
            assert http.post("/v1/completions", json=body).status_code == 200
    until(lambda: len(box.homes("one")) == 2 and doomed not in box.homes("one"), STARTED_S)

    # The machine of another node restarts: all of Ray is gone there.
    (restarted,) = {"west", "north"} - {doomed}
    assert cluster.stop_ray(ADDRESSES[restarted]) > 1
    box.fleet(restarted, "resume")
    until(lambda: restarted in box.homes("one"), STARTED_S)


def test_strangers_are_not_let_in(box: Box, tmp_path: Path) -> None:
    """Neither to the cluster without the secret, nor to the fleet with another one."""
    script = (
        "import ray, sys\n"
        f"ray.init(address='{ADDRESSES['east']}:{box.ray_port}', logging_level='ERROR')\n"
    )
    for token in ("", "cd" * 32):
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [sys.executable, "-c", script],
                env=env,
                capture_output=True,
                timeout=40,
                check=False,
            )
            assert done.returncode != 0
