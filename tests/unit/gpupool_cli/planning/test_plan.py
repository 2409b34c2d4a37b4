"""``gpupool plan``: the real command on small boxes, and against a fake daemon."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpupoold.domain import RequestRecord
from gpupoold.latency.models import StoredFit
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli, ProcessCli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon
from tests.unit.gpupool_cli.terminal import run_on_terminal

FIELDS = {
    *("devices", "num_devices", "groups", "groupings", "load", "duration_s", "target", "fits"),
    *("attainment", "attainment_by_run", "requests", "devices_needed", "gpus_needed"),
    *("devices_tried", "policy", "num_prefill", "policies", "models", "growth", "growth_limit"),
    *("changes", "requests_refused", "requests_cut", "requests_never_begun", "notes"),
    *("num_runs", "wall_s", "confidence", "fixed_roles", "fixed_roles_tried"),
}
SHORT = ("--duration", "30s")


@pytest.fixture
def models(tmp_path: Path) -> str:
    """A file of three small models."""
    path = tmp_path / "models.toml"
    path.write_text(
        '[[model]]\nname = "chat"\nshape = "Qwen2.5-7B"\nttft = "5s"\nrps = 0.1\n'
        '[[model]]\nname = "tune"\nshape = "Yi-1.5-6B"\ncount = 2\nrps = 0.05\n'
    )
    return str(path)


def document(result: Any) -> dict[str, Any]:
    """What ``--json`` printed, and nothing else."""
    assert result.stderr == ""
    printed: dict[str, Any] = json.loads(result.stdout)
    assert set(printed) == FIELDS
    return printed


def test_a_box_that_fits(cli: Cli, models: str) -> None:
    result = cli("plan", "--devices", "4xA10", "--models", models, *SHORT, "--json")
    plan = document(result)
    assert (result.exit_code, plan["fits"]) == (0, True)
    assert (plan["devices"], plan["num_devices"], plan["policy"]) == ("4xA10", 4, "gpupool")
    assert 1 <= plan["devices_needed"] <= 4
    assert [one["name"] for one in sorted(plan["models"], key=lambda one: one["name"])] == [
        *("chat", "tune-0", "tune-1")
    ]
    assert len(plan["attainment_by_run"]) == 3
    assert plan["changes"] == []
    by_name = {one["name"]: one for one in plan["models"]}
    assert by_name["chat"]["ttft_s"] == 5
    assert by_name["chat"]["ttft_p50_s"] <= by_name["chat"]["ttft_p99_s"]
    assert by_name["chat"]["step_times"] == "published"


def test_a_box_that_does_not(cli: Cli, models: str) -> None:
    arguments = ("--devices", "1xA10", "--models", models, "--rps", "0.5", *SHORT)
    result = cli("plan", *arguments, "--json")
    plan = document(result)
    assert (result.exit_code, plan["fits"]) == (1, False)
    assert plan["devices_needed"] > 1
    reaching = [one for one in plan["changes"] if one["reaches"]]
    assert all(min(one["attainment_by_run"]) >= 0.99 for one in reaching)
    text = cli("plan", *arguments)
    assert text.exit_code == 1
    titles = [line for line in text.stdout.splitlines() if line.endswith("?")]
    assert titles == [
        "Does it fit?",
        "How many A10?",
        "What will users see?",
        "What to change first?",
        "How sure is this?",
    ]
    assert "  No: " in text.stdout
    assert f"{plan['devices_needed']} are needed" in text.stdout
    for one in reaching:
        assert one["text"] in text.stdout


@pytest.mark.slow
def test_host_memory(cli: Cli, models: str) -> None:
    given = ("--kv-host", "2GiB", "--model-cache", "60GiB")
    result = cli("plan", "--devices", "1xA10", "--models", models, "--rps", "0.01", *given)
    shown = " ".join(result.output.split())
    assert "2 GiB for the KV of each GPU and 60 GiB for models" in shown
    assert "most such periods reach the target: 87.5 %" in shown


def test_engines_that_do_not_all_fit(cli: Cli, models: str) -> None:
    asked = ("plan", "--devices", "1xA10", "--models", models, *SHORT)
    usual = " ".join(cli(*asked).output.split())
    assert "Engines: 164 MiB each of 852 MiB" in usual
    assert "every device has those of all models" in usual
    scarce = ("--engine-memory", "1GiB", "--engines-limit", "2200MB", "--engine-load", "20s")
    shown = " ".join(cli(*asked, *scarce).output.split())
    assert "Engines: 1 GiB each of 1.01 GiB on a GPU" in shown
    assert "so that a device has those of 1 model." in shown
    assert "waits 20s for a load" in shown
    assert "if the file of models names their family" in shown


def test_far_switches_are_told(cli: Cli, models: str) -> None:
    asked = ("plan", "--devices", "2xA10", "--models", models, *SHORT)
    assert "NUMA" not in cli(*asked).output
    shown = " ".join(cli(*asked, "--far-share", "0.5").output.split())
    assert "half of the models are far from each device, copied at 50 % of the rate" in shown
    near, far = re.search(  # type: ignore[union-attr]
        r"takes (\d+)ms from the device's own node, ([\d.]+)s", shown
    ).groups()
    assert float(far) == pytest.approx(2 * float(near) / 1000, rel=0.02)


def test_fine_tunes_take_over_engines(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[[model]]\nname = "tune"\nshape = "Yi-1.5-6B"\ncount = 3\nfamily = "yi"\nrps = 0.05\n'
    )
    asked = ("plan", "--devices", "1xA10", "--models", str(path), *SHORT)
    shown = " ".join(cli(*asked, "--engine-memory", "500MB").output.split())
    assert "waits 13s for a load (0 in the runs)" in shown
    taken_over = re.search(r"10ms to take it over \((\d+) in the runs\)", shown)
    assert taken_over is not None
    assert int(taken_over[1]) > 0


def test_policies_are_compared(cli: Cli, models: str) -> None:
    arguments = ("--devices", "2xA10", "--models", models, *SHORT, "--target", "0.5")
    result = cli("plan", *arguments, "--policy", "static,gpupool,aegaeon")
    assert "Which policy?" in result.stdout
    assert "  aegaeon: " in result.stdout
    assert "best with 1 to prefill and 1 to decode" in result.stdout
    assert "  static: refuses: " in result.stdout
    alone = cli("plan", *arguments, "--devices", "3xA10", "--policy", "static")
    assert "One fewer is not enough: static refuses: only 2 of 3 models fit" in alone.stdout


def test_a_trace_and_a_rate_per_model(cli: Cli, models: str, tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n0,chat,10,20\n1,tune-1,9,9\n")
    base = ("plan", "--devices", "1xH800", "--models", models)
    plan = document(cli(*base, "--trace", str(trace), "--json"))
    assert (plan["requests"], plan["attainment"], len(plan["attainment_by_run"])) == (2, 1.0, 1)
    assert any("No requests, so no result, for tune-0." in note for note in plan["notes"])
    assert any("rough guess" in note for note in plan["notes"])
    result = cli(*base, "--rps", "0.1,0.2,0.3", *SHORT, "--json")
    assert document(result)["load"].startswith("0.6 requests/s")


def test_groups_of_gpus(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[[model]]\nname = "big"\nshape = "Llama-3.1-70B"\nrps = 0.1\n')
    base = ("plan", "--devices", "4xH100", "--models", str(path), *SHORT)
    refused = cli(*base)
    assert refused.exit_code == 2
    assert "big weighs 141 GB" in refused.stderr
    plan = document(cli(*base, "--groups", "1x4", "--json"))
    assert (plan["num_devices"], plan["groups"], plan["groupings"]) == (1, "1x4", [])
    assert plan["gpus_needed"] == 4
    named = ("plan", "--devices", "1x4xH100", "--models", str(path), *SHORT, "--json")
    assert document(cli(*named))["attainment"] == plan["attainment"]


def test_groups_that_the_planner_chooses(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[[model]]\nname = "big"\nshape = "Llama-3.1-70B"\nrps = 0.1\n'
        '[[model]]\nname = "small"\nshape = "Qwen2.5-7B"\nrps = 0.1\n'
    )
    base = ("plan", "--devices", "4xH100", "--models", str(path), *SHORT, "--groups")
    plan = document(cli(*base, "auto", "--json"))
    assert plan["fits"]
    tried = {one["groups"]: one for one in plan["groupings"]}
    assert set(tried) == {"1x4", "2x2", "1x2+2x1", "4x1"}
    assert "big weighs 141 GB" in tried["4x1"]["refused"]
    assert next(iter(tried)) == plan["groups"]
    growths = [one["growth"] for one in plan["groupings"]]
    assert growths == sorted(growths, reverse=True)
    mixed = document(cli(*base, "1x2+2x1", "--json"))
    assert (mixed["groups"], mixed["num_devices"], mixed["groupings"]) == ("1x2+2x1", 3, [])
    shown = cli(*base, "auto").stdout
    assert f"\nWhich groups?\n  {plan['groups']} carries the most: " in shown
    assert "  - 4x1: not possible: big weighs 141 GB" in shown


class TestDaemon:
    def record(self, model: str, arrived_at: float, **changes: Any) -> RequestRecord:
        record = RequestRecord(
            request_id="r",
            model=model,
            arrived_at=arrived_at,
            ttft_s=0.1,
            tbt_p99_s=0.01,
            num_prompt_tokens=100,
            num_output_tokens=50,
            num_tokens_in_time=50,
            finish_reason="stop",
            total_s=1.0,
        )
        return replace(record, **changes)

    def measured(self, daemon: FakeDaemon, name: str) -> None:
        decode = StoredFit("LinearDecode", (1e-7, 1e-4, 0.03), 0.99, 0.03, 0.07, 9)
        latency = samples.LATENCY.__class__(
            **{
                key: getattr(samples.LATENCY, key)
                for key in ("device", "engine_version", "dtype", "measured_at", "prefill")
            },
            bandwidth_bytes_per_s=2e10,
            decode=decode,
        )
        daemon.add(name, latency=latency, latencies=(latency,))

    def test_registered_and_recorded(self, daemon: FakeDaemon, cli: Cli) -> None:
        self.measured(daemon, "qwen")
        daemon.add("broken", state="failed")
        daemon.history = [
            self.record("qwen", 1010.0),
            self.record("qwen", 1000.0, num_prompt_tokens=5000),
            self.record("qwen", 1005.0, num_prompt_tokens=4090),
            self.record("gone", 1000.0),
        ]
        base = ("plan", "--devices", "2xA10", "--models", "registered")
        plan = document(cli(*base, "--trace", "recorded", "--json"))
        [model] = plan["models"]
        assert (model["name"], model["step_times"], model["requests"]) == ("qwen", "measured", 2)
        assert "measured on NVIDIA A10" in model["step_times_source"]
        assert (plan["requests_refused"], plan["requests_cut"]) == (1, 1)
        assert plan["fits"]
        notes = " ".join(plan["notes"])
        assert "broken failed to load" in notes
        assert "left out, without tokens or of removed models: 1." in notes
        assert cli(*base, "--rps", "0.1", *SHORT).exit_code == 0

    def test_elsewhere_the_dimensions_are_needed(
        self, daemon: FakeDaemon, cli: Cli, tiny_models: dict[str, Path]
    ) -> None:
        self.measured(daemon, "qwen")
        base = ("plan", "--devices", "H800", "--models", "registered", "--rps", "1", *SHORT)
        result = cli(*base)
        assert result.exit_code == 2
        assert "/models/qwen/config.json: cannot be read" in result.stderr
        daemon.add(
            "qwen", latencies=daemon.models["qwen"].latencies, path=str(tiny_models["tiny-qwen2"])
        )
        plan = document(cli(*base, "--json"))
        assert plan["models"][0]["step_times"] == "scaled"
        assert any("on NVIDIA A10 do not apply to H800" in note for note in plan["notes"])

    def test_registered_fine_tunes_are_a_family(
        self, daemon: FakeDaemon, cli: Cli, tiny_models: dict[str, Path]
    ) -> None:
        for name in ("qwen", "tune"):
            self.measured(daemon, name)
            known = daemon.models[name].latencies
            daemon.add(name, latencies=known, path=str(tiny_models["tiny-qwen2"]))
        scarce = ("--engine-memory", "1GB", "--engines-limit", "2200MB")
        base = ("plan", "--devices", "1xA10", "--models", "registered", "--rps", "0.1", *SHORT)
        assert "10ms to take it over" in " ".join(cli(*base, *scarce).output.split())
        daemon.add("tune", latencies=known, path=str(tiny_models["tiny-llama"]))
        assert "10ms" not in cli(*base, *scarce).output

    def test_measured_engines_are_counted(self, daemon: FakeDaemon, cli: Cli) -> None:
        for name, sizes in (("qwen", {"NVIDIA A10": 600_000_000}), ("yi", {"CPU": 10})):
            self.measured(daemon, name)
            daemon.add(name, latencies=daemon.models[name].latencies, engine_bytes=sizes)
        base = ("plan", "--devices", "1xA10", "--models", "registered", "--rps", "0.1", *SHORT)
        usual = " ".join(cli(*base).output.split())
        assert "Engines: 572 MiB for qwen, 164 MiB each for others of 852 MiB" in usual
        given = " ".join(cli(*base, "--engine-memory", "100MiB").output.split())
        assert "Engines: 100 MiB each of" in given

    def test_no_daemon_no_models_no_history(
        self, daemon: FakeDaemon, cli: Cli, models: str, process_cli: ProcessCli
    ) -> None:
        result = cli("plan", "--devices", "A10", "--models", "registered", "--rps", "1")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "no usable models" in result.stderr
        result = cli("plan", "--devices", "A10", "--models", models, "--trace", "recorded")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "recorded no requests" in result.stderr
        daemon.stop_admin()
        assert process_cli("plan", "--devices", "A10", "--models", "registered").returncode == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--devices": "0xA10"}, "box of devices"),
        ({"--devices": "4xTPU"}, "no hardware profile 'TPU'"),
        ({"--models": "/nowhere.toml"}, "/nowhere.toml: cannot be read"),
        ({"--rps": "-1"}, "rate -1 requests/s"),
        ({"--rps": "0"}, "rate 0 requests/s"),
        ({"--rps": "inf"}, "rate inf requests/s"),
        ({"--rps": "many"}, "--rps: 'many' is not a list of numbers"),
        ({"--rps": "1,2"}, "2 rates for 3 models"),
        ({"--target": "0"}, "target 0: "),
        ({"--target": "99"}, "write 0.99"),
        ({"--policy": "best"}, "no policy is named 'best'"),
        ({"--trace": "/nowhere.csv"}, "/nowhere.csv: cannot be read"),
        ({"--trace": "x.csv", "--rps": "1"}, "both --trace and --rps"),
        ({"--duration": "0s"}, "more than zero"),
        ({"--groups": "2"}, "the groups 1x2 have 2 GPUs, 4xA10 has 4"),
        ({"--groups": "many"}, "'many' names no groups of GPUs"),
        ({"--groups": "1x3+1x1"}, "cannot share the model equally"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, models: str, changes: dict[str, str], said: str) -> None:
    options = {"--devices": "4xA10", "--models": models} | changes
    result = cli("plan", *(part for pair in options.items() for part in pair))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("hint: ")]
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n1,1,1\n0,1,1\n", "line 3, column arrival_s"),
        ("arrival_s,model,prompt_tokens,output_tokens\n1,other,1,1\n", "asks for other"),
    ],
)
def test_a_bad_trace(cli: Cli, models: str, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    result = cli("plan", "--devices", "A10", "--models", models, "--trace", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_no_load(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[[model]]\nname = "a"\nshape = "Qwen2.5-7B"\n')
    result = cli("plan", "--devices", "A10", "--models", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no load to plan for" in result.stderr


def test_a_terminal_of_100_columns(environment: dict[str, str], models: str) -> None:
    arguments = ("plan", "--devices", "1xA10", "--models", models, "--rps", "0.3", *SHORT)
    status, shown = run_on_terminal(environment, "stdout", *arguments)
    assert status == 1
    lines = shown.splitlines()
    assert any(line.startswith("Does it fit?") for line in lines)
    assert max(map(len, lines)) <= 100


def test_what_is_simulated_is_shown_on_a_terminal(environment: dict[str, str], models: str) -> None:
    arguments = ("plan", "--devices", "1xH800", "--models", models, *SHORT)
    status, shown = run_on_terminal(environment, "stderr", *arguments)
    assert status == 0
    assert re.search(r"run \d+: ", shown)
