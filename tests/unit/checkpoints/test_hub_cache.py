"""Snapshots in caches that the hub's own library has filled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.hub import Hub
from gpupoold.checkpoints.hub_cache import FoundSnapshot, find_snapshot
from gpupoold.checkpoints.layout import Wanted
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.fake_hub import FakeHub

REPO = "org/model"
WEIGHTS = "model.safetensors"
FOLDER = "models--org--model"
FORGED_SIZE = b'{"format_version": 1, "files": {"config.json": {"size": "x", "blob_id": "0"}}}'


@pytest.fixture
def cache(hub: FakeHub, tmp_path: Path) -> Path:
    """A cache with the whole repository, made from a hub that the tests still have."""
    hub.add(REPO, samples.checkpoint() | {"README.md": b"#"})
    snapshot_download(REPO, cache_dir=tmp_path / "made", endpoint=hub.url)
    hub.requests.clear()
    # The library keeps listings in memory by path.
    return (tmp_path / "made").rename(tmp_path / "cache")


def found(*caches: Path, revision: str | None = None, repo_id: str = REPO) -> FoundSnapshot:
    return find_snapshot(Hub(repo_id), revision, caches, Wanted())


def snapshot_of(cache: Path) -> Path:
    (snapshot,) = (cache / FOLDER / "snapshots").iterdir()
    return snapshot


def without_listing(cache: Path) -> None:
    """Make the cache one of an older version of the library."""
    shutil.rmtree(cache / FOLDER / "trees")


def test_a_complete_snapshot_is_used_in_place_without_a_network(hub: FakeHub, cache: Path) -> None:
    result = found(cache)
    assert result.path == snapshot_of(cache)
    assert result.note == f"used in place, without a download: {result.path}"
    assert not hub.requests
    info = check_checkpoint(result.path, allow_pickle=False, allow_remote_code=False)
    assert info.num_parameters == samples.NUM_ELEMENTS


def test_the_asked_revision_counts(hub: FakeHub, cache: Path) -> None:
    repo = hub.repos[REPO]
    other = repo.commit(samples.checkpoint(max_position_embeddings=7), "v/2")
    assert found(cache, revision="v/2").path is None
    first = repo.revisions["main"]
    snapshot_download(REPO, cache_dir=cache, endpoint=hub.url, revision="v/2")
    places = {name: found(cache, revision=name).path for name in ("main", "v/2", first, other)}
    assert {name: path and path.name for name, path in places.items()} == {
        "main": first,
        "v/2": other,
        first: first,
        other: other,
    }


def test_the_second_of_two_caches(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert found(tmp_path / "empty", cache).path == snapshot_of(cache)


def test_nothing_is_asked_about_another_repository(hub: FakeHub, cache: Path) -> None:
    assert found(cache, repo_id="org/other") == FoundSnapshot(None)
    assert not hub.requests


@pytest.mark.parametrize("has_listing", [True, False])
@pytest.mark.parametrize("lost", [WEIGHTS, "tokenizer_config.json"])
def test_a_missing_file(lost: str, has_listing: bool, hub: FakeHub, cache: Path) -> None:
    (snapshot_of(cache) / lost).unlink()
    if not has_listing:
        without_listing(cache)
    result = found(cache)
    assert result.path is None
    assert result.note.endswith(f"incomplete or unreadable: {lost}")


def test_only_what_serving_needs_must_be_there(cache: Path) -> None:
    (snapshot_of(cache) / "README.md").unlink()
    assert found(cache).path is not None


def test_a_file_of_another_size(cache: Path) -> None:
    os.truncate(os.path.realpath(snapshot_of(cache) / WEIGHTS), 100)
    assert found(cache).note.endswith(f"incomplete or unreadable: {WEIGHTS}")


def test_without_a_listing_and_without_a_hub_the_checks_decide(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_listing(cache)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found(cache).path == snapshot_of(cache)
    (snapshot_of(cache) / WEIGHTS).unlink()
    assert found(cache).note.endswith("has no weights (*.safetensors)")


def test_links_must_not_leave_the_repository(cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(samples.weights())
    weights = snapshot_of(cache) / WEIGHTS
    weights.unlink()
    weights.symlink_to(outside)
    assert "model.safetensors is a link that leaves" in found(cache).note


@pytest.mark.parametrize("content", [b"../../../..", b"\xff\xfe", b"x" * 4096, b""])
def test_a_forged_reference(content: bytes, cache: Path) -> None:
    (cache / FOLDER / "refs" / "main").write_bytes(content)
    assert found(cache).path is None


@pytest.mark.parametrize("revision", ["../main", "/etc/passwd", "a/../main", "x" * 300, ""])
def test_a_revision_is_no_path(revision: str, cache: Path) -> None:
    result = found(cache, revision=revision)
    assert result.path == (snapshot_of(cache) if revision == "" else None)


@pytest.mark.parametrize(
    "listing", [b"{", b"[]", b'{"format_version": 1, "files": {"a": 3}}', FORGED_SIZE]
)
def test_a_forged_listing_is_not_believed(listing: bytes, hub: FakeHub, cache: Path) -> None:
    (tree,) = (cache / FOLDER / "trees").iterdir()
    tree.write_bytes(listing)
    assert found(cache).path == snapshot_of(cache)
    assert [one.path for one in hub.requests if one.path.startswith("/api/")]


def test_a_configured_cache_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    result = found(tmp_path / "nowhere")
    assert result.note == f"not used: {tmp_path}/nowhere: no such folder"


def test_an_adapter(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/lora", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    snapshot_download("org/lora", cache_dir=tmp_path, endpoint=hub.url)
    result = find_snapshot(Hub("org/lora"), None, [tmp_path], Wanted("adapter"))
    assert result.path is not None
    assert (result.path / "adapter_config.json").exists()
