"""README's tour as written, on simulated boxes whose host memory is simulated as well."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from benchmarks.private_daemon import PrivateDaemon
from gpupool_cli.main import app
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.units import parse_size_bytes
from tests.conftest import ROOT
from tests.functional.daemon_tools import child_env, private_daemon, ps
from tests.support.programs import run_daemon

GIB = 2**30
# What README's short name and paths stand for: folders without weights.
SHAPES = {"qwen-7b": "Qwen2.5-7B", "/models/my-coder": "Llama-3.1-8B"}
# A simulated device makes tokens only; the benchmarks and the screen have their own tests.
LEFT_OUT = re.compile(r"gpupool (top|bench|plan|simulate)|/models/my-(embedder|reranker)")


@dataclass(frozen=True)
class Box:
    devices: str
    memory: str
    model_cache_bytes: int
    kv_host_bytes: int
    refused_shape: str
    refused: str
    numa_nodes: int = 1

    @property
    def name(self) -> str:
        return f"{self.devices}-{self.memory}"

    @property
    def config(self) -> str:
        return (
            f'devices = ["sim:{self.devices}"]\n[simulated_host]\n'
            f'memory = "{self.memory}"\nnuma_nodes = {self.numa_nodes}\n'
        )


_ON_A10 = "61 GiB of weights (auto) and 1.22 GiB of KV do not fit on a device of 20.2 GiB"
_ON_H800 = "131 GiB of weights (auto) and 2.63 GiB of KV do not fit on a device of 71.7 GiB"
_IN_HOST_MEMORY = (
    "a snapshot of 61 GiB does not fit in the model cache of 37 GiB (59.6 GiB of simulated host "
    "memory less: memory.kv_host 12 GiB, processes 4.75 GiB, requests 732 MiB, system 3.98 GiB)"
)
BOXES = [
    Box("1xA10", "64GB", 38 * GIB, 11 * GIB, "Qwen2.5-32B", _ON_A10),
    Box("4xA10", "256GB", 160 * GIB, 11 * GIB, "Qwen2.5-32B", _ON_A10, 2),
    Box("8xH800", "2TB", 1468 * GIB, 39 * GIB, "Llama-3.1-70B", _ON_H800, 2),
    Box("1xH800", "64GB", 37 * GIB, 12 * GIB, "Qwen2.5-32B", _IN_HOST_MEMORY),
]
# The first box stands for all in the ordinary run.
SLOW = BOXES[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints and the adapter of the tour."""
    parent = tmp_path_factory.mktemp("tour")
    for shape in (*SHAPES.values(), "Llama-3.1-70B", "Qwen2.5-32B"):
        make_dummy_checkpoint(parent, shape)
    make_adapter(parent / "sql", parent / "dummy-weights-llama-3.1-8b")
    return parent


@pytest.fixture(
    params=[
        pytest.param(box, marks=[pytest.mark.slow] if box in SLOW else [], id=box.name)
        for box in BOXES
    ]
)
def box(request: pytest.FixtureRequest) -> Box:
    found: Box = request.param
    return found


@pytest.fixture
def daemon(box: Box, folder: Path, tmp_path: Path) -> Iterator[PrivateDaemon]:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen-7b").symlink_to(folder / "dummy-weights-qwen2.5-7b")
    # The budgets depend on the number of frontends, two by default.
    with private_daemon(box.config, tmp_path, frontends=2) as made:
        yield made


def make_adapter(folder: Path, base: Path) -> None:
    """A LoRA adapter of zeros for the first layer of a base."""
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(base),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    sides = {
        f"{place}.lora_A.weight": np.zeros((8, width), "float32"),
        f"{place}.lora_B.weight": np.zeros((width, 8), "float32"),
    }
    save_file(sides, folder / "adapter_model.safetensors")


def tour() -> list[list[str]]:
    """The arguments of the commands of README's tour, as written."""
    text = (ROOT / "README.md").read_text()
    text = text[text.index("## A tour") : text.index("## On a real GPU")]
    lines = re.findall(r"^    (?:\$ )?(gpupool .*)$", text, re.MULTILINE)
    return [shlex.split(one, comments=True)[1:] for one in lines if not LEFT_OUT.search(one)]


def caller(daemon: PrivateDaemon) -> Callable[..., Result]:
    """Calls of the command line in this process."""

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["--socket", str(daemon.socket_path), *arguments])

    return call


def test_the_tour_as_written(
    box: Box, daemon: PrivateDaemon, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUPOOL_CONFIG", str(tmp_path / "gpupool.toml"))
    call = caller(daemon)
    places = {
        "/models/my-coder": str(folder / "dummy-weights-llama-3.1-8b"),
        "/adapters/sql": str(folder / "sql"),
    }
    commands = tour()
    assert [one[0] for one in commands] == [
        *("add-model", "add-model", "list", "set", "add-preset", "add-adapter", "run", "why"),
        *("set", "rm", "config", "config", "config", "reload"),
    ]
    for arguments in commands:
        if arguments[0] == "run":  # synthetic answers are as long as they may be
            arguments = [*arguments, "--max-tokens", "20"]
        done = call(*(places.get(one, one) for one in arguments))
        assert done.exit_code == 0, (arguments, done.output)
    assert [model.name for model in ps(daemon).models] == ["qwen-7b"]
    check_budgets(box, call)
    check_refusal(box, call, folder)
    check_reloads(box, call, tmp_path / "gpupool.toml")


def check_budgets(box: Box, call: Callable[..., Result]) -> None:
    """The budgets in use are those of the simulated host, and both commands say why."""
    settings = {
        one["key"]: one for one in json.loads(call("config", "show", "--json").stdout)["settings"]
    }
    cache, kv_host = settings["memory.model_cache"], settings["memory.kv_host"]
    assert (cache["origin"], kv_host["origin"]) == ("machine", "machine")
    assert parse_size_bytes(cache["value"]) == box.model_cache_bytes
    assert parse_size_bytes(kv_host["value"]) == box.kv_host_bytes
    assert " of simulated host memory less: memory.kv_host " in cache["reason"]
    status = json.loads(call("status", "--json").stdout)
    assert status["model_cache_limit_bytes"] == box.model_cache_bytes
    limits = {
        one["kv_host_limit_bytes"] for one in json.loads(call("ps", "--json").stdout)["devices"]
    }
    assert limits == {box.kv_host_bytes}
    checks = {one["name"]: one for one in json.loads(call("doctor", "--json").stdout)["checks"]}
    assert checks["memory"]["verdict"] == "ok"
    assert checks["memory.model_cache"]["found"] == f"{cache['value']}: {cache['reason']}"


def check_refusal(box: Box, call: Callable[..., Result], folder: Path) -> None:
    """What does not fit is refused with the arithmetic, with and without ``--check``."""
    source = str(folder / f"dummy-weights-{box.refused_shape.lower()}")
    for option in ("--check", "--ttft=10s"):
        refused = call("add-model", "large", "--source", source, option)
        assert refused.exit_code == 5
        assert box.refused in refused.output


def check_reloads(box: Box, call: Callable[..., Result], config: Path) -> None:
    """A set size applies at once, a sum that cannot be had changes nothing, and back."""
    before = config.read_text()
    config.write_text(f'{before}\n[memory]\nmodel_cache = "8GiB"\n')
    assert '"8GiB"' in call("config", "diff").stdout
    assert call("reload").exit_code == 0
    refused = call("add-model", "second", "--source", str(config.parent / "models" / "qwen-7b"))
    assert refused.exit_code == 5
    assert "a snapshot of 14.2 GiB does not fit in the model cache of 8 GiB" in refused.output
    assert f"set memory.model_cache to 15GiB or more in {config}" in refused.output

    config.write_text(f'{before}\n[memory]\nmodel_cache = "9TiB"\n')
    for command in (("config", "diff"), ("reload",)):
        refused = call(*command)
        assert refused.exit_code == 2
        assert "memory.model_cache: 9" in refused.output
        assert "TiB are needed (memory.model_cache 9 TiB, processes " in refused.output
    refused = call("config", "check")
    assert refused.exit_code == 1
    assert "memory.model_cache: 9" in refused.output

    config.write_text(before)
    assert call("reload").exit_code == 0
    status = json.loads(call("status", "--json").stdout)
    assert status["model_cache_limit_bytes"] == box.model_cache_bytes


@pytest.mark.parametrize("more", [[], ["--check-config"]], ids=["start", "check"])
def test_a_sum_that_cannot_be_had_ends_the_start(more: list[str], tmp_path: Path) -> None:
    config = tmp_path / "gpupool.toml"
    folders = f'[paths]\nstate_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\n'
    config.write_text(f'{BOXES[0].config}{folders}[memory]\nmodel_cache = "60GiB"\n')
    done = run_daemon(["--config", str(config), *more], child_env(shares_import=True))
    assert done.returncode == 2
    needed = "65.5 GiB are needed (memory.model_cache 60 GiB, processes 4.75 GiB, requests 732 MiB)"
    assert f"gpupoold: memory.model_cache: {needed}" in done.stderr
    assert "but simulated host memory is 59.6 GiB\nhint: lower memory.model_cache" in done.stderr
