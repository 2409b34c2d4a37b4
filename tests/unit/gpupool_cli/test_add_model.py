"""``add-model``: what is asked of the daemon and what the user sees."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from gpupool_cli.progress import ProgressView
from gpupoold.api.schemas_models import AddModelRequest, ModelInfo, Progress
from tests.unit.gpupool_cli.conftest import Cli, ProcessCli, command
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon
from tests.unit.gpupool_cli.terminal import run_on_terminal


def _asked(daemon: FakeDaemon) -> AddModelRequest:
    request = daemon.requests[-1]
    assert isinstance(request, AddModelRequest)
    return request


def test_the_documented_call(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "qwen-7b", "--ttft", "10s", "--tbt", "100ms")
    assert result.exit_code == 0
    assert daemon.requests == [AddModelRequest(name="qwen-7b", ttft_s=10.0, tbt_s=0.1)]
    assert list(daemon.models) == ["qwen-7b"]


def test_every_option_reaches_the_daemon(daemon: FakeDaemon, cli: Cli) -> None:
    options = "--source org/q --revision v2 --ttft 500ms --tbt 50ms --max-len 2048 --dtype float16"
    result = cli("add-model", "q", *options.split(), "--alias", "a", "--alias", "b")
    assert result.exit_code == 0
    assert _asked(daemon) == AddModelRequest(
        name="q",
        source="org/q",
        revision="v2",
        ttft_s=0.5,
        tbt_s=0.05,
        max_model_len=2048,
        dtype="float16",
        aliases=["a", "b"],
    )


def test_a_relative_folder_is_made_absolute(
    daemon: FakeDaemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli("add-model", "q", "--source", "checkpoint").exit_code == 0
    assert _asked(daemon).source == os.path.realpath(tmp_path / "checkpoint")


def test_stages_are_told_on_stderr_and_stdout_stays_empty(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "q")
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "q: finding the checkpoint",
        "q: downloading 15 GiB",
        "q: checking",
        "q: loading",
        "q: ready, 15 GiB of weights",
    ]


def test_detached_the_daemon_goes_on(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "q", "--detach")
    assert result.exit_code == 0
    assert _asked(daemon).detach
    assert result.stderr.splitlines()[-1] == (
        "q: accepted; `gpupool ps` shows the progress, `gpupool events` the result"
    )


def test_detached_and_check(cli: Cli) -> None:
    assert cli("add-model", "q", "--detach", "--check").exit_code == 2


def test_a_remark_of_the_daemon_is_told(
    daemon: FakeDaemon, cli: Cli, environment: dict[str, str]
) -> None:
    arguments = ("add-model", "q", "--source", "cached/repo")
    assert "\nq: used in place: /cache/[bold]\n" in cli(*arguments).stderr
    daemon.models.clear()
    _, shown = run_on_terminal(environment, "stderr", *arguments)
    assert "q: used in place: /cache/[bold]" in shown


def test_an_interrupted_download_can_be_continued(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    daemon.download_pause_s = 20
    with subprocess.Popen(
        command("add-model", "q"), env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "downloading" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert process.returncode == 130
    assert "q: not added; the downloaded part is kept: repeat the command to go on\n" in told


def _download(done_gib: int) -> Progress:
    return Progress(
        stage="download", done_bytes=done_gib << 30, total_bytes=9 << 30, bytes_per_s=2.0**30
    )


def test_a_long_download_is_told_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 50.0
    with ProgressView("q", clock=lambda: now_s) as view:
        for second in range(10):
            now_s += 1.0
            view.show(_download(second))
    assert capsys.readouterr().err.splitlines() == [
        "q: downloading 9 GiB",
        "q: 5 GiB of 9 GiB, 55 %, 1 GiB/s, 4s left",
    ]


@pytest.mark.parametrize("options", [["--check"], []])
def test_json(daemon: FakeDaemon, cli: Cli, options: list[str]) -> None:
    result = cli("add-model", "q", "--json", *options)
    assert result.exit_code == 0
    model = TypeAdapter(ModelInfo).validate_json(result.stdout)
    assert (model.name, model.architecture) == ("q", "Qwen2ForCausalLM")
    assert list(daemon.models) == ([] if options else ["q"])


@pytest.mark.parametrize("option", ["--detach", "--fleet"])
def test_json_needs_a_model_to_print(daemon: FakeDaemon, cli: Cli, option: str) -> None:
    result = cli("add-model", "q", "--json", option)
    assert result.exit_code == 2
    assert "--json waits for the model" in result.stderr
    assert daemon.requests == []


def test_check_adds_nothing_and_prints_the_model(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "q", "--check")
    assert result.exit_code == 0
    assert daemon.models == {}
    assert "architecture  Qwen2ForCausalLM" in result.stdout
    assert "q: can be served; not added" in result.stderr
    fields = [line.split()[0] for line in result.stdout.splitlines()]
    assert "name" in fields
    assert not {"state", "added"} & set(fields)


def test_an_error_inside_the_stream(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "q", "--source", "missing/repo")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: no such repository\nhint: check --source\n")


def test_a_stream_without_an_end(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "q", "--source", "breaks-off")
    assert result.exit_code == 1
    assert "without a result" in result.stderr


def test_a_name_that_is_taken_is_refused(daemon: FakeDaemon, process_cli: ProcessCli) -> None:
    daemon.add("q")
    result = process_cli("add-model", "q")
    assert result.returncode == 5
    assert result.stdout == ""
    assert result.stderr == ("error: model 'q' exists\nhint: remove it first, or `gpupool set`\n")


@pytest.mark.parametrize("option", ["--ttft", "--tbt"])
@pytest.mark.parametrize("value", ["soon", "10 parsecs", "0s", "-1s", "", "9" * 400])
def test_a_bad_duration_names_the_option(cli: Cli, option: str, value: str) -> None:
    result = cli("add-model", "q", option, value)
    assert result.exit_code == 2
    assert f"'{option}'" in result.stderr
    assert "hint: see `gpupool add-model --help`" in result.stderr


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_a_usage_error(cli: Cli, name: str) -> None:
    result = cli("add-model", name)
    assert result.exit_code == 2
    assert "NAME" in result.stderr
