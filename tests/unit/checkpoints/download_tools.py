"""Downloads for tests, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from gpupoold.checkpoints.download import Download, Part
from gpupoold.checkpoints.fetcher import PART_FOLDER, ProgressCallback
from gpupoold.checkpoints.hub import Hub
from gpupoold.checkpoints.layout import Content, Wanted
from gpupoold.checkpoints.manifest import read_manifest
from gpupoold.checkpoints.peers import Peers
from gpupoold.errors import Failed, GpupoolError
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.fake_hub import FakeHub

ROOT = Path(__file__).parents[3]
REPO = "org/model"
WEIGHTS = "model.safetensors"
BIG = 3_000_000


async def download(
    repo_id: str,
    revision: str | None,
    target: Path,
    on_progress: ProgressCallback,
    *,
    allow_pickle: bool = False,
    allow_remote_code: bool = False,
    model_dirs: tuple[Path, ...] = (),
    content: Content = "checkpoint",
    part: Part = "all",
    peers: Peers | None = None,
) -> Path:
    wanted = Wanted(content, allow_pickle, allow_remote_code)
    hub = Hub(repo_id, model_dirs)
    job = Download(hub, revision, target, on_progress, wanted, part, peers or Peers())
    return await job.run()


def fetch(
    target: Path,
    repo_id: str = REPO,
    revision: str | None = None,
    progress: list[tuple[int, int]] | None = None,
    *,
    allow_pickle: bool = False,
    allow_remote_code: bool = False,
    model_dirs: tuple[Path, ...] = (),
    content: Content = "checkpoint",
    peers: Peers | None = None,
) -> Path:
    reports = progress if progress is not None else []
    return asyncio.run(
        download(
            repo_id,
            revision,
            target,
            lambda done, total, _rate: reports.append((done, total)),
            allow_pickle=allow_pickle,
            allow_remote_code=allow_remote_code,
            model_dirs=model_dirs,
            content=content,
            peers=peers,
        )
    )


def refusal(kind: type[GpupoolError], target: Path, repo_id: str = REPO) -> str:
    with pytest.raises(kind) as caught:
        fetch(target, repo_id)
    return str(caught.value)


def big_checkpoint() -> dict[str, bytes]:
    """With weights of ``BIG`` bytes (not real ones: a download does not look inside)."""
    return samples.checkpoint() | {WEIGHTS: os.urandom(BIG)}


def assert_complete(target: Path, commit: str) -> None:
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.complete
    assert manifest.commit == commit


def visible(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def damaged_part(hub: FakeHub, target: Path) -> None:
    """Begin a download and spoil what has arrived."""
    hub.cuts[WEIGHTS] = [2_000_000] + [0] * 5
    refusal(Failed, target)
    (part,) = (target / PART_FOLDER).glob("model*")
    part.write_bytes(b"\0" * part.stat().st_size)


def wait_for_part(target: Path, num_bytes: int) -> None:
    """Until the weights' part has this size; what the hub sent may still be on its way."""
    deadline = time.monotonic() + 10
    while sum(p.stat().st_size for p in (target / PART_FOLDER).glob("model*")) < num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
