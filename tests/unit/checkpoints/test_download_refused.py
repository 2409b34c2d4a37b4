"""Downloads that are refused, before or after the first bytes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from gpupoold.checkpoints.download import KEPT_FREE_BYTES
from gpupoold.checkpoints.manifest import read_manifest
from gpupoold.errors import Failed, Refused, UsageError
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.download_tools import (
    REPO,
    WEIGHTS,
    big_checkpoint,
    download,
    fetch,
    refusal,
    visible,
    wait_for_part,
)
from tests.unit.checkpoints.fake_hub import FakeHub


class TestRefused:
    def test_unknown_repository(self, hub: FakeHub, tmp_path: Path) -> None:
        told = refusal(Refused, tmp_path / "m")
        assert told.startswith(f"there is no repository {REPO} at {hub.url}, or it is private")
        assert not (tmp_path / "m" / "config.json").exists()

    def test_private_repository(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, samples.checkpoint(), access="private")
        told = refusal(Refused, tmp_path / "m")
        assert "set HF_TOKEN of an account with access" in told
        assert "/etc/gpupool/environment) and restart the daemon" in told

    def test_gated_repository(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, samples.checkpoint(), access="gated")
        told = refusal(Refused, tmp_path / "m")
        assert f"access to {REPO} at {hub.url} is restricted" in told
        assert f"{hub.url}/{REPO}" in told
        monkeypatch.setenv("HF_TOKEN", hub.token)
        assert visible(fetch(tmp_path / "m")) == samples.checkpoint()

    def test_unknown_revision(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, samples.checkpoint())
        with pytest.raises(Refused, match="has no revision 'v9'"):
            fetch(tmp_path / "m", revision="v9")

    @pytest.mark.parametrize("repo_id", ["a/b/c", "a--b/c", "-a/b"])
    def test_malformed_id(self, repo_id: str, hub: FakeHub, tmp_path: Path) -> None:
        assert "malformed" in refusal(UsageError, tmp_path / "m", repo_id)

    @pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense", "http://[x"])
    def test_unreachable_hub(
        self, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(Failed) as caught:
            fetch(tmp_path / "m", model_dirs=(Path("/models"), Path("/more")))
        told = str(caught.value)
        assert f"could not reach the Hugging Face hub at {endpoint}" in told
        assert "give --source PATH or put the checkpoint in one of /models, /more" in told

    def test_offline_by_choice(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "HF_HUB_OFFLINE forbids" in refusal(Refused, tmp_path / "m")
        assert not hub.requests

    @pytest.mark.parametrize("answer", [b"<html>log in</html>", b"[]", b"{}", b'{"id": 3}'])
    def test_not_a_hub(self, answer: bytes, hub: FakeHub, tmp_path: Path) -> None:
        hub.broken_listing = answer
        assert "does not answer like a Hugging Face hub" in refusal(Failed, tmp_path / "m")

    def test_hub_that_stays_ill(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, samples.checkpoint())
        hub.statuses[WEIGHTS] = [503] * 9
        assert "HTTP 503" in refusal(Failed, tmp_path / "m")

    def test_only_pickles(self, hub: FakeHub, tmp_path: Path) -> None:
        files = samples.checkpoint()
        files["pytorch_model.bin"] = files.pop(WEIGHTS)
        hub.add(REPO, files | {"training_args.bin": b"x"})
        assert "allow_pickle = true" in refusal(Refused, tmp_path / "m")
        assert not any("/resolve/" in request.path for request in hub.requests)
        assert visible(fetch(tmp_path / "m", allow_pickle=True)) == files

    def test_no_weights(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, {"config.json": b"{}", "README.md": b"x"})
        assert "has no weights" in refusal(Refused, tmp_path / "m")

    def test_custom_code_before_the_weights(self, hub: FakeHub, tmp_path: Path) -> None:
        files = samples.checkpoint(auto_map={"AutoModel": "m.X"}) | {"m.py": b"pass"}
        hub.add(REPO, files)
        assert "allow_remote_code = true" in refusal(Refused, tmp_path / "m")
        assert not hub.downloads(WEIGHTS)
        assert visible(fetch(tmp_path / "m", allow_remote_code=True)) == files

    def test_full_disk(self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add(REPO, big_checkpoint())
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1_000_000))
        told = refusal(Refused, tmp_path / "m")
        assert "has 2.86 MiB, of which 2.86 MiB is missing; 977 KiB is free" in told
        assert "256 MiB must stay free (free 258 MiB, or set paths.download_dir" in told
        assert not hub.downloads("config.json")

    def test_two_downloads_that_do_not_fit_together(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, big_checkpoint())
        hub.add("org/other", big_checkpoint())
        hub.holds[WEIGHTS] = [1_000_000]
        # 3 MB and what is missing of the first 3 MB are more, until the first is complete.
        usage = shutil.disk_usage(tmp_path)._replace(free=4_900_000 + KEPT_FREE_BYTES)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

        async def both() -> None:
            first = asyncio.create_task(download(REPO, None, tmp_path / "m", lambda *_: None))
            await asyncio.to_thread(wait_for_part, tmp_path / "m", 1_000_000)
            with pytest.raises(Refused, match=r"1\.91 MiB are for other downloads") as caught:
                await download("org/other", None, tmp_path / "o", lambda *_: None)
            assert caught.value.hint.startswith("free ")
            hub.released.set()
            await first
            await download("org/other", None, tmp_path / "o", lambda *_: None)

        asyncio.run(both())

    def test_no_space_during_the_download(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, samples.checkpoint())

        def full(_draft: Path, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr("gpupoold.checkpoints.fetcher.replace_durably", full)
        told = refusal(Failed, tmp_path / "m")
        assert f"cannot write {tmp_path}/m/" in told
        assert "No space left on device (the downloaded part is kept" in told

    def test_listing_without_sizes(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.has_sizes = False
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1_000_000))
            assert "2.86 MiB is missing" in refusal(Refused, tmp_path / "m")
        assert visible(fetch(tmp_path / "m")) == files

    def test_unwritable_place(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, samples.checkpoint())
        (tmp_path / "file").write_bytes(b"")
        assert "Not a directory" in refusal(Failed, tmp_path / "file" / "m")

    def test_folder_of_something_else(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, samples.checkpoint())
        hub.add("org/other", samples.checkpoint())
        samples.write(tmp_path / "mine", {"notes.txt": b"x"})
        assert "not downloaded by gpupool" in refusal(Refused, tmp_path / "mine")
        fetch(tmp_path / "m")
        assert f"holds {REPO}" in refusal(Refused, tmp_path / "m", "org/other")

    def test_second_download_of_the_same(self, hub: FakeHub, tmp_path: Path) -> None:
        hub.add(REPO, big_checkpoint())
        hub.holds[WEIGHTS] = [1_000_000]

        async def both() -> None:
            first = asyncio.create_task(download(REPO, None, tmp_path / "m", lambda *_: None))
            await asyncio.to_thread(hub.held.wait)
            with pytest.raises(Refused, match="is being downloaded"):
                await download(REPO, None, tmp_path / "m", lambda *_: None)
            hub.released.set()
            await first

        asyncio.run(both())

    def test_unreadable_note_counts_as_none(self, tmp_path: Path) -> None:
        for content in (b"", b"[]", b'{"files": 3}', b'{"files": [{"x": 1}]}', b"\xff"):
            samples.write(tmp_path, {".gpupool-download.json": content})
            assert read_manifest(tmp_path) is None
        note: dict[str, object] = {"repo_id": "a/b", "revision": None, "commit": "c", "files": []}
        samples.write(tmp_path, {".gpupool-download.json": json.dumps(note).encode()})
        unfinished = read_manifest(tmp_path)
        assert unfinished is not None
        assert not unfinished.complete
