"""The bounds of every file of a checkpoint, before and while a file is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpupoold.checkpoints.files import (
    MAX_DEPTH,
    MAX_VALUES,
    check_files,
    fingerprint,
    max_bytes,
    read_json,
)
from gpupoold.checkpoints.survey import survey_adapter, survey_checkpoint
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples

READ_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "modules.json",
    "vocab.json",
    "merges.txt",
    "model.safetensors",
    "model.safetensors.index.json",
    "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json",
)
LARGE = sorted(name for name in READ_FILES if max_bytes(Path(name).name) is not None)


def survey(folder: Path) -> object:
    return survey_checkpoint(
        folder, "auto", {}, allow_pickle=False, allow_remote_code=False, may_be_remote=False
    )


def refusal(folder: Path) -> str:
    with pytest.raises(Refused) as caught:
        survey(folder)
    assert caught.value.hint
    return caught.value.message


def replaced(folder: Path, name: str) -> Path:
    """A complete checkpoint without one file, for which the folder is there."""
    samples.write(folder, samples.checkpoint())
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    return file


@pytest.mark.parametrize("name", READ_FILES)
def test_a_named_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(replaced(tmp_path, name))
    message = refusal(tmp_path)
    assert name in message
    assert "is a named pipe, not a regular file" in message


@pytest.mark.parametrize("name", READ_FILES)
def test_a_device(name: str, tmp_path: Path) -> None:
    replaced(tmp_path, name).symlink_to("/dev/zero")
    assert "is a device, not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize("name", [name for name in READ_FILES if "safetensors" not in name])
def test_a_link_to_anybody_elses_file(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('"{{ secret }}"')
    replaced(tmp_path / "model", name).symlink_to(secret)
    message = refusal(tmp_path / "model")
    assert f"is a link to {secret}, which is outside of the checkpoint" in message


@pytest.mark.parametrize("name", LARGE)
def test_a_large_file_is_not_read(name: str, tmp_path: Path) -> None:
    file = replaced(tmp_path, name)
    file.touch()
    os.truncate(file, (max_bytes(file.name) or 0) + 1)  # a hole
    message = refusal(tmp_path)
    assert name in message
    assert "more than the allowed" in message


def test_a_header_that_claims_too_much(tmp_path: Path) -> None:
    file = replaced(tmp_path, "model.safetensors")
    file.write_bytes((90_000_000).to_bytes(8, "little") + b"{")
    os.truncate(file, 100_000_000)
    assert "claims a header of 90000000 bytes" in refusal(tmp_path)


def test_weights_may_be_links(tmp_path: Path) -> None:
    file = replaced(tmp_path / "model", "model.safetensors")
    (tmp_path / "elsewhere.safetensors").write_bytes(samples.weights())
    file.symlink_to("../elsewhere.safetensors")
    survey(tmp_path / "model")


def test_links_of_a_hub_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    blobs = samples.write(repository / "blobs", samples.checkpoint())
    for name in os.listdir(blobs):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    survey(snapshot)
    local = tmp_path / "local"
    local.mkdir()
    for name in os.listdir(blobs):  # as `huggingface-cli download --local-dir` did
        (local / name).symlink_to(blobs / name)
    survey(local)


def test_links_inside_of_the_folder(tmp_path: Path) -> None:
    replaced(tmp_path, "config.json").symlink_to("model.json")
    (tmp_path / "model.json").write_bytes(samples.checkpoint()["config.json"])
    survey(tmp_path)


def test_files_that_nobody_reads_do_not_matter(tmp_path: Path) -> None:
    samples.write(tmp_path, samples.checkpoint())
    os.mkfifo(tmp_path / "events")
    (tmp_path / "trainer_state.json").touch()
    os.truncate(tmp_path / "trainer_state.json", 1 << 30)
    survey(tmp_path)


def test_depth_and_number_of_values(tmp_path: Path) -> None:
    file = tmp_path / "some_config.json"
    file.write_text('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH)
    assert read_json(file)
    for text, problem in (
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "more than 64 levels deep"),
        ('{"a":' + "[" * 50_000, "is not valid JSON"),
        ('{"a":[' + "[]," * MAX_VALUES + "[]]}", "has more than 1,000,000 values"),
        ("[]", "must hold a JSON object"),
        ("\ufeff{}", "is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
    ):
        file.write_text(text)
        with pytest.raises(Refused, match=problem):
            read_json(file)


def test_an_adapter_with_a_named_pipe(tmp_path: Path) -> None:
    samples.write(tmp_path / "adapter", {"adapter_config.json": b"{}"})
    os.mkfifo(tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(Refused, match="is a named pipe"):
        survey_adapter(tmp_path / "adapter", tmp_path, allow_pickle=False)


def test_a_changed_file_changes_the_fingerprint(tmp_path: Path) -> None:
    samples.write(tmp_path, samples.checkpoint())
    before = fingerprint(tmp_path)
    (tmp_path / "notes.md").write_text("not read")
    assert fingerprint(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    after = fingerprint(tmp_path)
    assert after != before
    os.replace(tmp_path / "chat_template.jinja", tmp_path / "kept")
    (tmp_path / "chat_template.jinja").write_text("{{ messagez }}")
    assert fingerprint(tmp_path) != after


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    samples.write(tmp_path, samples.checkpoint())
    check_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    survey(tmp_path)
