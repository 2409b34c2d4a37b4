"""Weights from Xet storage: the real client against a storage on localhost."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from gpupoold.checkpoints import fetcher as fetcher_module
from gpupoold.checkpoints.fetcher import PART_FOLDER
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.download_tools import download
from tests.unit.checkpoints.fake_hub import XET_TOKEN, FakeHub

REPO = "org/model"
WEIGHTS = "model.safetensors"
BIG = 3_000_000


@pytest.fixture(autouse=True)
def storage(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub with Xet storage; the client's own folder is in the test's."""
    monkeypatch.setattr(fetcher_module, "FIRST_RETRY_S", 0.001)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    hub.has_xet = True


def big_checkpoint() -> dict[str, bytes]:
    return samples.checkpoint() | {WEIGHTS: os.urandom(BIG)}


def fetch(target: Path) -> dict[str, bytes]:
    asyncio.run(download(REPO, None, target, lambda *_: None))
    return {one.name: one.read_bytes() for one in target.iterdir() if not one.name.startswith(".")}


def test_weights_come_from_the_storage(hub: FakeHub, tmp_path: Path) -> None:
    files = big_checkpoint()
    hub.add(REPO, files)
    assert fetch(tmp_path / "m") == files
    assert hub.xet_downloads()
    assert not hub.downloads(WEIGHTS)
    assert hub.downloads("config.json")


def test_each_server_gets_its_own_token(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.add(REPO, big_checkpoint(), access="private")
    fetch(tmp_path / "m")
    asked = [one for one in hub.requests if "/reconstructions/" in one.path]
    assert {one.token for one in asked} == {XET_TOKEN}
    assert {one.token for one in hub.xet_downloads()} == {None}


def test_an_earlier_part_is_continued(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = big_checkpoint()
    hub.add(REPO, files)
    hub.cuts[WEIGHTS] = [2_000_000] + [0] * 5
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        with pytest.raises(Exception, match="the downloaded part is kept"):
            fetch(tmp_path / "m")
    assert not hub.xet_downloads()
    hub.requests.clear()
    assert fetch(tmp_path / "m") == files
    assert sum(one.sent_bytes for one in hub.xet_downloads()) < BIG - 2_000_000 + 100_000
    assert not hub.downloads(WEIGHTS)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "local:///tmp", "nonsense"])
def test_a_storage_that_cannot_be_used(
    url: str, hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = big_checkpoint()
    hub.add(REPO, files)
    hub.xet_url = url
    assert fetch(tmp_path / "m") == files
    assert len(hub.downloads(WEIGHTS)) == 1
    assert "HTTP instead of Xet storage" in caplog.text


def test_wrong_bytes_are_fetched_again_by_http(hub: FakeHub, tmp_path: Path) -> None:
    files = big_checkpoint()
    hub.add(REPO, files)
    hub.breaks_xet = True
    assert fetch(tmp_path / "m") == files
    assert hub.xet_downloads()
    assert len(hub.downloads(WEIGHTS)) == 1


def test_a_cut_connection(hub: FakeHub, tmp_path: Path) -> None:
    files = big_checkpoint()
    hub.add(REPO, files)
    hub.xet_cuts += [1_000_000]
    assert fetch(tmp_path / "m") == files


def test_cancelling_ends_a_transfer_at_once(hub: FakeHub, tmp_path: Path) -> None:
    files = big_checkpoint()
    hub.add(REPO, files)
    hub.xet_holds += [100_000]

    async def cancel_when_held() -> None:
        task = asyncio.create_task(download(REPO, None, tmp_path / "m", lambda *_: None))
        assert await asyncio.to_thread(hub.held.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_when_held())
    assert not hub.released.is_set()
    deadline = time.monotonic() + 10
    while any(one.name.startswith("download") for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list((tmp_path / "m" / PART_FOLDER).glob("model*"))
    hub.released.set()
    assert fetch(tmp_path / "m") == files
