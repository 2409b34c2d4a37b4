"""``gpupool make-tiny-models``: it needs no daemon and never loads torch itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpupool_cli import tiny
from gpupoold.errors import Failed, GpupoolError, Refused, UsageError
from tests.unit.gpupool_cli.conftest import Cli


@pytest.fixture(autouse=True)
def _importable(project_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", project_env["PYTHONPATH"])


def test_made_folders_are_listed(cli: Cli, tmp_path: Path) -> None:
    options = [str(tmp_path), "--arch", "llama", "--size", "4MB"]
    result = cli("make-tiny-models", *options)
    assert result.exit_code == 0
    folder = tmp_path / "tiny-llama"
    assert result.stdout.split() == ["NAME", "SIZE", "PATH", folder.name, "4", "MiB", str(folder)]
    assert (folder / "model.safetensors").stat().st_size > 3_800_000
    [made] = json.loads(cli("make-tiny-models", *options, "--json").stdout)
    assert made["path"] == str(folder)
    assert made["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())


def test_dummy_models_take_no_disk(cli: Cli, tmp_path: Path) -> None:
    shapes = ["--shape", "Qwen2.5-7B", "--shape", "Llama-2-13B"]
    made = json.loads(cli("make-dummy-models", str(tmp_path), *shapes, "--json").stdout)
    assert [model["name"] for model in made] == [
        "dummy-weights-qwen2.5-7b",
        "dummy-weights-llama-2-13b",
    ]
    for model in made:
        weights = Path(model["path"]) / "model.safetensors"
        assert weights.stat().st_size > 15_000_000_000
        assert model["size_bytes"] < 1_000_000
    assert cli("make-dummy-models", str(tmp_path), "--shape", "GPT-9").exit_code == 2


@pytest.mark.parametrize("options", [["--size", "1MB"], ["--size", "x"], ["--arch", "gpt"]])
def test_bad_options_are_usage_errors(cli: Cli, tmp_path: Path, options: list[str]) -> None:
    assert cli("make-tiny-models", str(tmp_path), *options).exit_code == UsageError.exit_code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("maker", ["make-tiny-models", "make-dummy-models"])
def test_a_folder_that_cannot_be_made(cli: Cli, tmp_path: Path, maker: str) -> None:
    (tmp_path / "file").touch()
    result = cli(maker, str(tmp_path / "file"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path}/file: cannot create a folder: Not a directory" in result.stderr


def test_error_of_the_child_keeps_its_kind(tmp_path: Path) -> None:
    (tmp_path / "tiny-qwen2").mkdir()
    with pytest.raises(Refused, match="not a tiny checkpoint") as caught:
        tiny.run_maker(["--arch=qwen2", str(tmp_path)])
    assert caught.value.hint == "choose another folder"


def test_broken_environment_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(GpupoolError, match="no torch here") as caught:
        tiny.run_maker(["--arch=llama", str(tmp_path / "models")])
    assert isinstance(caught.value, Failed)
    assert "make venv" in caught.value.hint
    assert list((tmp_path / "models").iterdir()) == []
