"""``gpupool simulate`` needs no daemon: the real command on small boxes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.programs import run_command
from tests.unit.gpupool_cli.terminal import run_on_terminal

SMALL = ("--devices", "1xH800", "--models", "2", "--duration", "20s", "--policy", "gpupool")


@pytest.fixture
def env(project_env: dict[str, str]) -> dict[str, str]:
    """No workloads, no configuration of the developer's."""
    kept = {key: value for key, value in project_env.items() if not key.startswith("GPUPOOL_")}
    return kept | {"GPUPOOL_CONFIG": os.devnull}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpupool_cli.main", "simulate", *arguments]


def simulate(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(["simulate", *arguments], env, timeout_s=120)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_trace(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("arrival_s,model,prompt_tokens,output_tokens", *lines)) + "\n")
    return path


def test_one_object_per_line(env: dict[str, str]) -> None:
    rows = rows_of(simulate(env, *SMALL, "--policy", "gpupool,request-level", "--json"))
    assert [row["policy"] for row in rows] == ["gpupool", "request-level"]
    for row in rows:
        assert (row["devices"], row["models"], row["rps"]) == ("1xH800", 2, 0.1)
        assert row["preset"] == "poisson"
        assert set(row) >= {
            *("attainment", "attainment_paper", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s"),
            *("switches", "wall_s", "requests", "on_schedule"),
        }


@pytest.mark.slow
def test_host_memory(env: dict[str, str]) -> None:
    small = ("--devices", "1xH800", "--models", "6", "--duration", "60s", "--policy", "gpupool")
    budgets = ("--model-cache", "70GB", "--kv-host", "1GiB")
    [usual] = rows_of(simulate(env, *small, "--json"))
    [tight] = rows_of(simulate(env, *small, *budgets, "--json"))
    assert (tight["kv_host_bytes"], tight["model_cache_bytes"]) == (1 << 30, 70 * 10**9)
    assert usual["disk_reads"] == 0
    assert int(str(tight["disk_reads"])) > 0
    refused = simulate(env, *small, "--model-cache", "20GB")
    assert refused.returncode == 2
    assert "weighs 26 GB, the model cache has 20 GB" in refused.stderr
    assert "is not a size" in simulate(env, *small, "--kv-host", "much").stderr


def test_engines_that_do_not_all_fit(env: dict[str, str]) -> None:
    small = ("--devices", "1xH800", "--models", "3", "--duration", "60s", "--policy", "gpupool")
    scarce = ("--engine-memory", "1GB", "--engines-limit", "3200MB", "--engine-load", "5s")
    [usual] = rows_of(simulate(env, *small, "--json"))
    [tight] = rows_of(simulate(env, *small, *scarce, "--json"))
    assert usual["engine_loads"] == 0
    assert int(str(tight["engine_loads"])) > 0
    assert tight["finished"] == usual["finished"] == usual["requests"]
    assert float(str(tight["ttft_p99_s"])) > 5.0
    refused = simulate(env, *small, "--engine-memory", "0B", "--engines-limit", "2GB")
    assert refused.returncode == 2
    assert "add --engine-memory" in refused.stderr
    shared = (*scarce[2:], "--engine-memory", "500MB", "--families", "3", "--models", "6")
    [taken_over] = rows_of(simulate(env, *small, *shared, "--json"))
    assert taken_over["families"] == 3
    assert int(str(taken_over["engine_takeovers"])) > 0
    table = simulate(env, *small, *shared).stdout.splitlines()
    assert table[0].split()[-2:] == ["LOADS", "TAKEOVERS"]


def test_engines_of_some_models_may_have_another_size(env: dict[str, str]) -> None:
    limited = ("--engines-limit", "3200MB", "--engine-load", "5s")
    scarce = ("--engine-memory", "1GB,m01=2GB", *limited)
    [tight] = rows_of(simulate(env, *SMALL, *scarce, "--json"))
    assert int(str(tight["engine_loads"])) > 0
    for wrong, told in (
        ("1GB,m01", "write for example"),
        ("1GB,m01=x", "is not a size"),
        ("1GB,m99=1GB", "m99, which is no model here"),
    ):
        refused = simulate(env, *SMALL, "--engine-memory", wrong, "--engines-limit", "2GB")
        assert refused.returncode == 2
        assert told in refused.stderr


def test_a_table_and_what_it_is_good_for(env: dict[str, str]) -> None:
    done = simulate(env, *SMALL, "--models", "2,3")
    header, *rows, empty, title, goodput = done.stdout.splitlines()
    assert header.split()[:4] == ["PRESET", "POLICY", "DEVICES", "MODELS"]
    assert [row.split()[:4] for row in rows] == [
        ["poisson", "gpupool", "1xH800", number] for number in "23"
    ]
    assert empty == ""
    assert title.endswith("90 % GOODPUT")
    assert goodput.split() == ["poisson", "gpupool", "at", "least", "3", "models"]
    assert done.stderr.splitlines() == [
        "1 of 2: poisson: gpupool, 2 models, 0.1 rps",
        "2 of 2: poisson: gpupool, 3 models, 0.1 rps",
    ]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_bar_on_a_terminal(env: dict[str, str], jobs: str) -> None:
    arguments = ("simulate", *SMALL, "--models", "2,3", "--jobs", jobs)
    status, shown = run_on_terminal(env, "stderr", *arguments)
    assert status == 0
    assert "2 of 2: poisson: gpupool, 3 models" in shown


def test_a_single_point_has_no_goodput(env: dict[str, str]) -> None:
    assert len(simulate(env, *SMALL).stdout.splitlines()) == 2


@pytest.mark.slow
def test_a_preset_with_changes_in_several_processes(env: dict[str, str]) -> None:
    done = simulate(
        env, "aegaeon-fig12", "--policy", "request-level", "--models", "2", "--duration", "9s",
        "--jobs", "2", "--json",
    )  # fmt: skip
    assert [row["preset"] for row in rows_of(done)] == ["aegaeon-fig12-ix2", "aegaeon-fig12-ox2"]


def test_a_burst_has_columns_for_its_stages(env: dict[str, str]) -> None:
    done = simulate(env, "tokenscale-burst")
    header, *lines = done.stdout.splitlines()
    assert header.split()[-5:] == ["ROLES", "TTFT%", "TBT%", "BURST-p50", "BURST-p99"]
    assert [line.split()[0].removeprefix("tokenscale-burst-") for line in lines] == [
        "converting", "fixed", "mixed",
    ]  # fmt: skip
    assert [line.split()[-5] for line in lines] == ["prefill,decode"] * 2 + ["mixed"]


def test_roles_can_be_chosen(env: dict[str, str]) -> None:
    asked = (*SMALL, "--devices", "3xH800")
    [row] = rows_of(simulate(env, *asked, "--roles", "prefill,2xdecode", "--json"))
    assert row["roles"] == "prefill,2xdecode"
    refused = simulate(env, *asked, "--roles", "prefill,decode")
    assert refused.returncode != 0
    assert "2 roles for 3 devices" in refused.stderr


def test_active_models_have_a_column(env: dict[str, str]) -> None:
    done = simulate(env, "aegaeon-fig4", "--models", "3", "--duration", "1m")
    assert done.stdout.splitlines()[0].split()[-1] == "ACTIVE"


def test_gpus_in_groups(env: dict[str, str]) -> None:
    [row] = rows_of(
        simulate(
            env,
            "aegaeon-fig17-72b",
            "--rps",
            "0.1",
            "--duration",
            "20s",
            "--json",
            "--policy",
            "gpupool",
        )
    )
    assert (row["devices"], row["tensor_parallel"]) == ("8xH800", 4)


def test_presets_are_listed(env: dict[str, str]) -> None:
    listed = [line.split()[0] for line in simulate(env, "--list").stdout.splitlines()]
    assert {"aegaeon-fig11a", "aegaeon-fig13", "azure23-conv", "real-traces"} <= set(listed)


class TestTraces:
    def test_a_file(self, env: dict[str, str], tmp_path: Path) -> None:
        trace = write_trace(tmp_path / "mine.csv", "0,a,10,20", "1,b,10,20")
        done = simulate(env, "--trace", str(trace), "--policy", "gpupool", "--json")
        [row] = rows_of(done)
        assert (row["preset"], row["models"], row["requests"]) == ("mine", 2, 2)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "empty"),
            ("arrival_s,prompt_tokens,output_tokens\n", "no requests"),
            ("arrival_s,output_tokens\n0,1\n", "no column prompt_tokens"),
            ("arrival_s,prompt_tokens,output_tokens\n1,1,1\n0,1,1\n", "line 3, column arrival_s"),
            ("arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "less than 1"),
        ],
    )
    def test_a_bad_file(self, env: dict[str, str], tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "bad.csv"
        path.write_text(text)
        done = simulate(env, "--trace", str(path), "--policy", "gpupool")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"error: {path}: " in done.stderr
        assert said in done.stderr

    def test_the_folder_of_presets(self, env: dict[str, str], tmp_path: Path) -> None:
        write_trace(tmp_path / "arena27_first5min.csv.gz", "0,a,10,20").rename(tmp_path / "t.csv")
        packed = subprocess.run(["gzip", "-c", tmp_path / "t.csv"], capture_output=True, check=True)
        (tmp_path / "arena27_first5min.csv.gz").write_bytes(packed.stdout)
        arguments = ("arena27", "--policy", "gpupool", "--json")
        config = tmp_path / "gpupool.toml"
        config.write_text(f'[paths]\nworkloads_dir = "{tmp_path}"\n')
        for found in (
            simulate(env, *arguments, "--workloads", str(tmp_path)),
            simulate(env | {"GPUPOOL_WORKLOADS": str(tmp_path)}, *arguments),
            simulate(env | {"GPUPOOL_CONFIG": str(config)}, *arguments),
        ):
            [row] = rows_of(found)
            assert (row["preset"], row["requests"]) == ("arena27", 1)

    def test_no_folder(self, env: dict[str, str], tmp_path: Path) -> None:
        nowhere = simulate(env, "azure23-conv")
        assert (nowhere.returncode, nowhere.stdout) == (2, "")
        assert "azure23_conv.csv.gz: the folder of recorded workloads is not set" in nowhere.stderr
        assert "--workloads" in nowhere.stderr
        elsewhere = simulate(env, "azure23-conv", "--workloads", str(tmp_path))
        assert elsewhere.returncode == 2
        assert f"{tmp_path}/azure23_conv.csv.gz" in elsewhere.stderr


def test_models_that_do_not_fit_are_left_out(env: dict[str, str]) -> None:
    done = simulate(env, *SMALL, "--devices", "2xA10", "--models", "2,3", "--json")
    assert [row["models"] for row in rows_of(done)] == [2, 3]
    assert "left out: Llama-2-13B weighs 26 GB, one GPU of 2xA10 can hold 21.7 GB" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "0xH800"), "box of devices"),
        (("--devices", "4xTPU"), "TPU"),
        (("aegaeon-fig17-72b", "--devices", "1xA10"), "weighs"),
        (("--tensor-parallel", "2"), "groups"),
        (("--models", "many"), "--models: 'many' is not a list of whole numbers"),
        (("--models", "2.5"), "--models: '2.5' is not a list of whole numbers"),
        (("--rps", "many"), "--rps: 'many' is not a list of numbers"),
        (("--models", "0"), "at least one"),
        (("--rps", "-1"), "rate"),
        (("--rps", "nan"), "rate"),
        (("--ttft", "0s"), "more than zero"),
        (("--tbt", "0"), "more than zero"),
        (("--tbt", "100"), "has no unit: write 100ms or 100s"),
        (("--duration", "-3"), "not a duration"),
        (("--prefill", "1"), "prefill"),
        (("--policy", "best"), "no policy"),
        (("--jobs", "0"), "jobs"),
        (("--plot", "a.pdf"), ".svg or .png"),
        (("--plot", "/nowhere/a.svg"), "no folder"),
        (("--trace", "/nowhere.csv"), "cannot be read"),
        (("aegaeon-fig99",), "did you mean"),
        (("aegaeon-fig11a", "--trace", "a.csv"), "both"),
    ],
)
def test_what_cannot_be_simulated(
    env: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    done = simulate(env, *SMALL, "--models", "3", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children so far."""
    parent = psutil.Process(pid)
    times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_ends_it_at_once(env: dict[str, str], jobs: str) -> None:
    arguments = ("--models", "100,101,102,103", "--policy", "gpupool", "--duration", "1h")
    with subprocess.Popen(
        command(*arguments, "--jobs", jobs),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while cpu_s(process.pid) < 4.0:  # on a busy machine it may still be importing
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in said
