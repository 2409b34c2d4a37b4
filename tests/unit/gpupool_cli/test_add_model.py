"""``add-model``: what is asked of the daemon and what the user sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpupoold.api.schemas import AddModelRequest
from tests.unit.gpupool_cli.conftest import Cli, ProcessCli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


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
    options = "--source org/q --revision v2 --ttft 500ms --tbt 0.05 --max-len 2048 --dtype float16"
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


def test_check_adds_nothing_and_prints_the_model(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("add-model", "q", "--check")
    assert result.exit_code == 0
    assert daemon.models == {}
    assert "architecture  Qwen2ForCausalLM" in result.stdout
    assert "q: can be served; not added" in result.stderr


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
