"""Keys of saved snapshots: what changes them, and what does not."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpupoold.control.weights import kept_snapshots as snapshot_keys
from gpupoold.control.weights.cache import SnapshotId
from gpupoold.control.weights.kept_snapshots import SnapshotKeys, snapshot_key
from gpupoold.domain import Adapter, DeviceFacts, ModelName, Preset, Targets
from gpupoold.errors import Failed
from gpupoold.wire.messages import ModelToLoad, WorkerReady

MIB = 1 << 20

OTHER_VALUES: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 128,
    "allow_remote_code": True,
    "engine": {"quantization": "fp8"},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    (path / "experts").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(b"tensors")
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").symlink_to("../blobs/b")
    (path / "experts" / "0.safetensors").write_bytes(b"tensors")
    for file in (path / "config.json", tmp_path / "blobs" / "b"):
        os.utime(file, ns=(10**18, 10**18))
    return path


@pytest.fixture
def model(checkpoint: Path) -> ModelToLoad:
    return ModelToLoad(name=ModelName("m"), source="a", path=str(checkpoint))


def key_of(model: ModelToLoad) -> str:
    return snapshot_key(model, "0.32.0", "NVIDIA H200", 2 * MIB)


def test_a_key_is_the_same_each_time(model: ModelToLoad) -> None:
    assert key_of(model) == key_of(model)
    assert len(bytes.fromhex(key_of(model))) == 32


NOT_IN_THE_KEY: dict[str, Any] = {
    "name": "other",
    "aliases": ("alias",),
    "source": "other",
    "revision": "other",
    "targets": Targets(9.0, 9.0),
    "devices": (1,),
    "pace": "steady",
    "media_hosts": ("images.example",),
    "max_images": 3,
    "max_image_pixels": 1_000,
    "presets": (Preset("think"),),
    "adapters": (Adapter("poet", "s", "/p"),),
}


@pytest.mark.parametrize("field", NOT_IN_THE_KEY)
def test_names_and_targets_are_not_in_the_key(model: ModelToLoad, field: str) -> None:
    changed = dataclasses.replace(model, **{field: NOT_IN_THE_KEY[field]})
    assert key_of(changed) == key_of(model)


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_other_settings_are_in_the_key(model: ModelToLoad, field: str) -> None:
    other = dataclasses.replace(model, **{field: OTHER_VALUES[field]})
    assert key_of(other) != key_of(model)


def test_options_of_the_api_are_not_in_the_key(model: ModelToLoad) -> None:
    changed = dataclasses.replace(model, engine={"tool_call_parser": "hermes"})
    assert key_of(changed) == key_of(model)


def test_every_setting_is_tried() -> None:
    tried = {"path", *NOT_IN_THE_KEY, *OTHER_VALUES}
    assert {one.name for one in dataclasses.fields(ModelToLoad)} == tried


def test_the_path_is_in_the_key(model: ModelToLoad, checkpoint: Path) -> None:
    before = key_of(model)
    moved = checkpoint.rename(checkpoint.with_name("moved"))
    assert key_of(dataclasses.replace(model, path=str(moved))) != before


def test_engine_device_page_and_format_are_in_the_key(
    model: ModelToLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        key_of(model),
        snapshot_key(model, "0.33.0", "NVIDIA H200", 2 * MIB),
        snapshot_key(model, "0.32.0", "NVIDIA H100", 2 * MIB),
        snapshot_key(model, "0.32.0", "NVIDIA H200", 4 * MIB),
    }
    monkeypatch.setattr(snapshot_keys, "FORMAT", 1)
    assert len(keys | {key_of(model)}) == 5


def edit_with_its_old_time(path: Path) -> None:
    """Longer, with the modification time it had."""
    status = path.stat()
    path.write_text("{ }")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": lambda path: edit_with_its_old_time(path / "config.json"),
    "touched by a nanosecond": lambda path: os.utime(path / "config.json", ns=(10**18, 10**18 + 1)),
    "touched behind a link": lambda path: os.utime(
        path / "model.safetensors", ns=(10**18, 10**18 + 1)
    ),
    "touched below": lambda path: os.utime(path / "experts" / "0.safetensors", ns=(1, 1)),
    "added": lambda path: (path / "new.json").touch(),
    "removed": lambda path: (path / "config.json").unlink(),
    "renamed": lambda path: (path / "config.json").rename(path / "other.json"),
    "moved within": lambda path: (path / "config.json").rename(path / "experts" / "config.json"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_checkpoint_has_another_key(
    model: ModelToLoad, checkpoint: Path, change: str
) -> None:
    before = key_of(model)
    CHANGES[change](checkpoint)
    assert key_of(model) != before


def test_hidden_files_and_folders_are_not_in_the_key(model: ModelToLoad, checkpoint: Path) -> None:
    before = key_of(model)
    (checkpoint / ".gpupool-download.json").write_text("{}")
    (checkpoint / ".git").mkdir()
    (checkpoint / ".git" / "HEAD").write_text("ref")
    assert key_of(model) == before


def test_linked_folders_are_looked_through_once(model: ModelToLoad, checkpoint: Path) -> None:
    shared = checkpoint.with_name("shared")
    shared.mkdir()
    (shared / "1.safetensors").write_bytes(b"tensors")
    (checkpoint / "linked").symlink_to(shared)
    (checkpoint / "loop").symlink_to(checkpoint)
    before = key_of(model)
    (shared / "1.safetensors").write_bytes(b"more tensors")
    assert key_of(model) != before


def test_a_checkpoint_that_cannot_be_looked_through(model: ModelToLoad, checkpoint: Path) -> None:
    (checkpoint.with_name("blobs") / "b").unlink()
    with pytest.raises(Failed, match=r"m: cannot read .*model\.safetensors"):
        key_of(model)
    shutil.rmtree(checkpoint)
    with pytest.raises(Failed, match=f"m: cannot read the checkpoint {checkpoint}"):
        key_of(model)


async def test_a_key_is_that_of_the_last_look(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelToLoad(name=ModelName("a"), source="a", path=str(checkpoint))
    ready = WorkerReady(DeviceFacts(1 << 30, 4096, 1e9), "0.32.0", "emulated")
    keys = SnapshotKeys()
    assert keys.get(SnapshotId("a")) is None
    first = await keys.note(model, ready)
    assert first is not None
    assert keys.all() == {SnapshotId("a"): first}
    (checkpoint / "config.json").write_text('{"changed": true}')
    second = await keys.note(model, ready)
    assert second not in (first, None)
    assert keys.get(SnapshotId("a")) == second
    shutil.rmtree(checkpoint)
    assert await keys.note(model, ready) is None
    assert "cannot read the checkpoint" in caplog.text
    assert keys.all() == {}
