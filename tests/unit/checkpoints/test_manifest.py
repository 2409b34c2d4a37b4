"""Checks before the weights: from small files, sizes and the beginnings of weight files."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gpupoold.checkpoints import manifest
from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint
from gpupoold.checkpoints.download import Part
from gpupoold.checkpoints.manifest import HEADERS_FOLDER, remote_weights
from gpupoold.checkpoints.survey import check_fits, estimate_weight_bytes
from gpupoold.errors import Failed, GpupoolError, Refused
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.download_tools import download
from tests.unit.checkpoints.fake_hub import LFS_SUFFIXES, FakeHub

REPO = "org/model"
NUM_ELEMENTS = 4_000_000
FIRST_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FIRST_RETRY_S", 0.001)


def fetch(target: Path, part: Part = "small files", *, allow_pickle: bool = False) -> Path:
    return asyncio.run(
        download(REPO, None, target, lambda *_: None, allow_pickle=allow_pickle, part=part)
    )


def look(target: Path, *, allow_pickle: bool = False) -> CheckpointInfo:
    """What is known before the weights are here."""
    remote = remote_weights(fetch(target, allow_pickle=allow_pickle))
    assert remote is not None
    return check_checkpoint(
        target, allow_pickle=allow_pickle, allow_remote_code=False, remote=remote
    )


def weight_bytes_sent(hub: FakeHub) -> int:
    return sum(one.sent_bytes for one in hub.requests if one.path.endswith(LFS_SUFFIXES))


def large_checkpoint(dtype: str = "float16") -> dict[str, bytes]:
    """Two shards of 8 MB with an index."""
    files = samples.sharded()
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    for name, prefix in zip(shards, "ab", strict=True):
        tensors = {
            f"{prefix}.embed.weight": np.zeros(NUM_ELEMENTS, dtype),
            f"{prefix}.norm.weight": np.zeros(16, dtype),
        }
        files[name] = save(tensors)
    return files


def test_a_large_checkpoint_is_known_before_its_weights(hub: FakeHub, tmp_path: Path) -> None:
    files = large_checkpoint()
    hub.add(REPO, files)
    before = look(tmp_path / "m")
    assert before.num_parameters == 2 * (NUM_ELEMENTS + 16)
    assert weight_bytes_sent(hub) <= 2 * FIRST_BYTES < before.weight_bytes / 20
    assert not list((tmp_path / "m").glob("*.safetensors"))
    fetch(tmp_path / "m", "all")
    assert remote_weights(tmp_path / "m") is None
    assert not (tmp_path / "m" / HEADERS_FOLDER).exists()
    after = check_checkpoint(tmp_path / "m", allow_pickle=False, allow_remote_code=False)
    assert after == before
    assert (tmp_path / "m" / "model-00001-of-00002.safetensors").read_bytes() == (
        files["model-00001-of-00002.safetensors"]
    )


def test_a_refusal_costs_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, large_checkpoint("float32"))
    info = look(tmp_path / "m")
    with pytest.raises(Refused, match="do not fit on a device"):
        check_fits(info, "float32", estimate_weight_bytes(info, "float32"), 30_000_000)
    check_fits(
        info, "auto", estimate_weight_bytes(info, "auto"), 17_000_000
    )  # as 16-bit weights, as the engine loads them
    assert weight_bytes_sent(hub) <= 2 * FIRST_BYTES


def test_the_rest_is_fetched_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, samples.sharded())
    fetch(tmp_path / "m")
    fetch(tmp_path / "m")
    fetch(tmp_path / "m", "all")
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert len(hub.downloads(name)) == 1


def test_a_header_longer_than_the_first_bytes(hub: FakeHub, tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.{'x' * 60}.weight": np.zeros(4, "float16") for i in range(4000)}
    data = save(tensors)
    assert len(data) > 2 * FIRST_BYTES
    hub.add(REPO, samples.checkpoint() | {"model.safetensors": data + b""})
    assert look(tmp_path / "m").num_parameters == 4 * 4000
    assert len(hub.downloads("model.safetensors")) == 2


def test_a_hub_that_ignores_ranges(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, large_checkpoint())
    hub.ignores_range = True
    hub.redirects_large_files = True
    assert look(tmp_path / "m").num_parameters == 2 * (NUM_ELEMENTS + 16)


def test_broken_connections_are_retried(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, samples.checkpoint())
    hub.cuts["model.safetensors"] = [3, 100]
    hub.statuses["model.safetensors"] = [503]
    assert look(tmp_path / "m").num_parameters == samples.NUM_ELEMENTS


def test_a_hub_that_stays_ill(hub: FakeHub, tmp_path: Path) -> None:
    hub.add(REPO, samples.checkpoint())
    hub.statuses["model.safetensors"] = [503] * 9
    with pytest.raises(Failed, match=r"the beginning of model\.safetensors.*503"):
        fetch(tmp_path / "m")


def refused(hub: FakeHub, target: Path, files: dict[str, bytes], **options: Any) -> str:
    hub.add(REPO, files)
    with pytest.raises(Refused) as caught:
        look(target, **options)
    assert weight_bytes_sent(hub) <= FIRST_BYTES * len(files)
    return str(caught.value)


def test_wrong_files_are_refused_before_the_weights(hub: FakeHub, tmp_path: Path) -> None:
    files = samples.checkpoint()
    good = files["model.safetensors"]
    bad = {
        "empty": b"",
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "short": good[:-10],
        "long": good + b"x",
        "html": b"<html>" * 1000,
    }
    told = {
        name: refused(hub, tmp_path / name, files | {"model.safetensors": data})
        for name, data in bad.items()
    }
    assert "less than the smallest header" in told["empty"]
    assert "Git LFS pointer" in told["pointer"]
    assert "cut short" in told["short"]
    assert f"{len(good) - 10} bytes" in told["short"]
    assert "1 bytes after the last tensor" in told["long"]
    assert "is it safetensors?" in told["html"]
    assert all(f"{tmp_path / name}/model.safetensors" in text for name, text in told.items())


def test_index_and_shards_must_agree(hub: FakeHub, tmp_path: Path) -> None:
    files = samples.sharded()
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"]["c.norm.weight"] = "model-00001-of-00002.safetensors"
    wrong = {"model.safetensors.index.json": json.dumps(index).encode()}
    assert "'c.norm.weight' should be in" in refused(hub, tmp_path / "1", files | wrong)
    del files["model-00002-of-00002.safetensors"]
    assert "1 of 2 weight files are missing" in refused(hub, tmp_path / "2", files)


def test_no_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    files = samples.checkpoint()
    del files["tokenizer.json"]
    assert "has no tokenizer" in refused(hub, tmp_path / "m", files)


def test_pickles_are_sized_by_the_listing(hub: FakeHub, tmp_path: Path) -> None:
    files = samples.checkpoint()
    files["pytorch_model.bin"] = bytes(6000)
    del files["model.safetensors"]
    hub.add(REPO, files)
    info = look(tmp_path / "m", allow_pickle=True)
    assert info.weight_bytes == 6000
    assert not hub.downloads("pytorch_model.bin")


def test_no_space_is_said_first(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, large_checkpoint())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    with pytest.raises(Refused, match=r"15\.3 MiB is missing"):
        fetch(tmp_path / "m")
    assert not hub.downloads("config.json")


class TestCommits:
    def test_a_check_long_ago_does_not_choose_the_version(
        self, hub: FakeHub, tmp_path: Path
    ) -> None:
        repo = hub.add(REPO, samples.checkpoint() | {"vocab.txt": b"old"})
        fetch(tmp_path / "m")
        newer = samples.checkpoint(hidden_size=2)
        repo.commit(newer)
        fetch(tmp_path / "m")
        assert json.loads((tmp_path / "m" / "config.json").read_text())["hidden_size"] == 2
        assert not (tmp_path / "m" / "vocab.txt").exists()
        fetch(tmp_path / "m", "all")
        assert json.loads((tmp_path / "m" / "config.json").read_text())["hidden_size"] == 2

    def test_a_download_that_has_begun_keeps_its_version(
        self, hub: FakeHub, tmp_path: Path
    ) -> None:
        shard = large_checkpoint()["model-00001-of-00002.safetensors"]
        files = samples.checkpoint() | {"model.safetensors": shard}
        repo = hub.add(REPO, files)
        fetch(tmp_path / "m")
        hub.cuts["model.safetensors"] = [1_000_000] + [0] * 9
        with pytest.raises(GpupoolError):
            asyncio.run(_interrupted(tmp_path / "m"))
        repo.commit(samples.checkpoint(hidden_size=2))
        hub.cuts.clear()
        fetch(tmp_path / "m")
        fetch(tmp_path / "m", "all")
        assert (tmp_path / "m" / "model.safetensors").read_bytes() == files["model.safetensors"]
        assert "hidden_size" not in json.loads((tmp_path / "m" / "config.json").read_text())


async def _interrupted(target: Path) -> None:
    from gpupoold.checkpoints import fetcher as module

    first, module.FIRST_RETRY_S = module.FIRST_RETRY_S, 0.001
    try:
        await download(REPO, None, target, lambda *_: None)
    finally:
        module.FIRST_RETRY_S = first
