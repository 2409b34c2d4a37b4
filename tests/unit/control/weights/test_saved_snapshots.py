"""What is saved of which model, within the budget, and what goes when a model goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.control.weights.cache import CachedImage
from gpupoold.control.weights.keys import ImageKeys
from gpupoold.control.weights.saved_snapshots import SavedImages
from gpupoold.memory.memfd import create_memfd
from gpupoold.wire.messages import ModelToLoad, WorkerReady

READY = WorkerReady(0, 1, 1 << 30, 4096, 1e9, "0.32.0", "emulated")
SIZE = 8192


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def image() -> Iterator[CachedImage]:
    fd = create_memfd("test", SIZE)
    os.pwrite(fd, b"weights", 0)
    yield CachedImage(fd, SIZE, "layout", (1, 2, 3))
    os.close(fd)


def model(name: str, path: Path) -> ModelToLoad:
    return ModelToLoad(name=name, path=str(path), ttft_s=1.0, tbt_s=0.1)


async def keep(images: SavedImages, name: str, checkpoint: Path, image: CachedImage) -> None:
    assert await images.look_up(model(name, checkpoint), READY) is None
    assert await images.read(name) is None
    images.keep(name, image)
    await images.stop()


async def test_what_is_kept_is_found(tmp_path: Path, checkpoint: Path, image: CachedImage) -> None:
    images = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    await keep(images, "a", checkpoint, image)
    again = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    assert await again.look_up(model("b", checkpoint), READY) == SIZE
    assert (await again.sizes(), await again.used_bytes()) == ({"b": SIZE}, SIZE)
    found = await again.read("b")
    assert found is not None
    assert (found.num_bytes, found.layout_digest, found.canary) == (SIZE, "layout", (1, 2, 3))
    assert os.pread(found.fd, 7, 0) == b"weights"
    os.close(found.fd)


async def test_nothing_is_kept_without_a_budget(
    tmp_path: Path, checkpoint: Path, image: CachedImage
) -> None:
    images = SavedImages(tmp_path / "images", 0, ImageKeys())
    await keep(images, "a", checkpoint, image)
    assert not (tmp_path / "images").exists()
    assert (await images.sizes(), await images.used_bytes()) == ({}, 0)


async def test_the_budget_is_for_all_together(
    tmp_path: Path, checkpoint: Path, image: CachedImage, caplog: pytest.LogCaptureFixture
) -> None:
    images = SavedImages(tmp_path / "images", SIZE + 1, ImageKeys())
    await keep(images, "a", checkpoint, image)
    other = tmp_path / "other"
    other.mkdir()
    await keep(images, "b", other, image)
    assert len(list((tmp_path / "images").iterdir())) == 1
    assert "b: its image of 8 KiB is not saved" in caplog.text


async def test_a_file_goes_with_the_last_model_that_has_it(
    tmp_path: Path, checkpoint: Path, image: CachedImage
) -> None:
    images = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    await keep(images, "a", checkpoint, image)
    assert await images.look_up(model("b", checkpoint), READY) == SIZE
    assert await images.sizes() == {"a": SIZE, "b": SIZE}
    images.forget("a")
    assert len(list((tmp_path / "images").iterdir())) == 1
    images.forget("b")
    images.forget("b")
    assert not list((tmp_path / "images").iterdir())


async def test_a_file_goes_when_its_checkpoint_has_changed(
    tmp_path: Path, checkpoint: Path, image: CachedImage
) -> None:
    await keep(SavedImages(tmp_path / "images", 1 << 20, ImageKeys()), "a", checkpoint, image)
    (checkpoint / "config.json").write_text('{"changed": true}')
    images = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    await keep(images, "a", checkpoint, image)
    assert len(list((tmp_path / "images").iterdir())) == 2
    await images.tidy(["a", "not looked for yet"])
    assert len(list((tmp_path / "images").iterdir())) == 2
    await images.tidy(["a"])
    assert len(list((tmp_path / "images").iterdir())) == 1
    assert await images.look_up(model("a", checkpoint), READY) == SIZE


async def test_a_checkpoint_that_is_not_there_has_no_image(
    tmp_path: Path, image: CachedImage, caplog: pytest.LogCaptureFixture
) -> None:
    images = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    await keep(images, "a", tmp_path / "nowhere", image)
    assert "cannot look through the checkpoint" in caplog.text
    assert not (tmp_path / "images").exists()


async def test_settled_is_after_saving(
    tmp_path: Path, checkpoint: Path, image: CachedImage
) -> None:
    images = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    await images.settled("a")
    await images.look_up(model("a", checkpoint), READY)
    num_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        images.keep("a", image)
    assert len(os.listdir("/proc/self/fd")) == num_before + 3
    await images.settled("a")
    assert await images.sizes() == {"a": SIZE}
    assert len(os.listdir("/proc/self/fd")) == num_before  # no descriptor keeps the memory


async def test_a_smaller_budget_deletes_what_was_used_least_recently(
    tmp_path: Path, image: CachedImage
) -> None:
    images = SavedImages(tmp_path / "images", 1 << 20, ImageKeys())
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        await keep(images, name, folder, image)
    images.budget_bytes = 2 * SIZE
    images.shrink({"a": 2.0, "b": 1.0, "c": 3.0}.get)
    await images.stop()
    assert await images.sizes() == {"a": SIZE, "c": SIZE}
    images.budget_bytes = 0
    images.shrink({"a": 2.0}.get)
    await images.stop()
    assert not list((tmp_path / "images").iterdir())
