"""Downloads from a real HTTP server that are interrupted and resumed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gpupoold.checkpoints import hub as hub_module
from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.fetcher import PART_FOLDER
from gpupoold.checkpoints.hub import HubFile
from gpupoold.checkpoints.manifest import MANIFEST_FILE, Manifest, read_manifest
from gpupoold.errors import Failed, Refused
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.download_tools import (
    BIG,
    REPO,
    ROOT,
    WEIGHTS,
    big_checkpoint,
    damaged_part,
    download,
    fetch,
    refusal,
    visible,
    wait_for_part,
)
from tests.unit.checkpoints.fake_hub import FakeHub


class TestResume:
    def test_goes_on_after_cut_connections(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.cuts[WEIGHTS] = [1_000_000, 500_000, 0, 1]
        reports: list[tuple[int, int]] = []
        assert visible(fetch(tmp_path / "m", progress=reports)) == files
        ranges = [request.range for request in hub.downloads(WEIGHTS)]
        assert ranges[:3] == [None, "bytes=1000000-", "bytes=1500000-"]
        assert sum(request.sent_bytes for request in hub.downloads(WEIGHTS)) == BIG
        assert reports[-1][0] == reports[-1][1]

    def test_next_run_fetches_the_rest_only(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.cuts[WEIGHTS] = [2_000_000] + [0] * 5
        told = refusal(Failed, tmp_path / "m")
        assert "downloading model.safetensors" in told
        assert "the downloaded part is kept" in told
        with pytest.raises(Refused, match="did not finish"):
            check_checkpoint(tmp_path / "m", allow_pickle=False, allow_remote_code=False)
        hub.requests.clear()
        reports: list[tuple[int, int]] = []
        assert visible(fetch(tmp_path / "m", progress=reports)) == files
        (request,) = hub.downloads(WEIGHTS)
        assert (request.range, request.sent_bytes) == ("bytes=2000000-", BIG - 2_000_000)
        assert not hub.downloads("config.json")
        assert reports[0][0] > 0

    def test_after_a_killed_process(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.holds[WEIGHTS] = [2_000_000]
        code = (
            "import asyncio, sys; from pathlib import Path\n"
            "from gpupoold.checkpoints.download import Download\n"
            "from gpupoold.checkpoints.hub import Hub\n"
            "from gpupoold.checkpoints.layout import Wanted\n"
            f"job = Download(Hub({REPO!r}), None, Path(sys.argv[1]), lambda *_: None, Wanted())\n"
            "asyncio.run(job.run())"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "m")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        with child:
            assert hub.held.wait(timeout=60)
            wait_for_part(tmp_path / "m", 2_000_000)
            child.kill()
        hub.released.set()
        hub.requests.clear()
        assert visible(fetch(tmp_path / "m")) == files
        (request,) = hub.downloads(WEIGHTS)
        assert (request.range, request.sent_bytes) == ("bytes=2000000-", BIG - 2_000_000)

    def test_keeps_to_the_commit_it_began_with(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        repo = hub.add(REPO, files)
        hub.cuts[WEIGHTS] = [1_000_000] + [0] * 5
        refusal(Failed, tmp_path / "m")
        repo.commit(big_checkpoint())
        assert visible(fetch(tmp_path / "m")) == files

    def test_finished_one_needs_no_network(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, samples.checkpoint())
        target = fetch(tmp_path / "m")
        hub.requests.clear()
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        assert fetch(target) == target
        assert not hub.requests

    def test_lost_file_of_a_finished_one_is_fetched_again(
        self, hub: FakeHub, tmp_path: Path
    ) -> None:
        files = samples.checkpoint()
        hub.add(REPO, files)
        target = fetch(tmp_path / "m")
        (target / "tokenizer.json").unlink()
        assert visible(fetch(target)) == files

    def test_hub_that_ignores_ranges(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.ignores_range = True
        hub.cuts[WEIGHTS] = [1_000_000]
        reports: list[tuple[int, int]] = []
        assert visible(fetch(tmp_path / "m", progress=reports)) == files
        assert reports[-1][0] == reports[-1][1]

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_passing_trouble_of_the_hub(self, status: int, hub: FakeHub, tmp_path: Path) -> None:
        files = samples.checkpoint()
        hub.add(REPO, files)
        hub.statuses[WEIGHTS] = [status] * 3
        assert visible(fetch(tmp_path / "m")) == files

    def test_damaged_part_is_fetched_again(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        damaged_part(hub, tmp_path / "m")
        reports: list[tuple[int, int]] = []
        assert visible(fetch(tmp_path / "m", progress=reports)) == files
        assert [one.range for one in hub.downloads(WEIGHTS)][-2:] == ["bytes=2000000-", None]
        assert reports[-1][0] == reports[-1][1]

    def test_damage_that_stays(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        listed = hub_module.Hub.list_files
        wrong = "0" * 64

        def changed(one: hub_module.Hub, revision: str | None) -> tuple[str, tuple[HubFile, ...]]:
            commit, found = listed(one, revision)
            return commit, tuple(
                replace(file, digest=wrong) if file.path == WEIGHTS else file for file in found
            )

        monkeypatch.setattr(hub_module.Hub, "list_files", changed)
        assert "damaged twice (its checksum is wrong)" in refusal(Failed, tmp_path / "m")
        assert len(hub.downloads(WEIGHTS)) == 2
        assert list((tmp_path / "m" / PART_FOLDER).glob("model*")) == []

    def test_part_that_is_too_long_is_dropped(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.cuts[WEIGHTS] = [2_000_000] + [0] * 5
        refusal(Failed, tmp_path / "m")
        (part,) = (tmp_path / "m" / PART_FOLDER).glob("model*")
        os.truncate(part, BIG + 1)
        assert visible(fetch(tmp_path / "m")) == files

    def test_cancelling_stops_and_keeps_the_part(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_module, "READ_TIMEOUT_S", 0.3)
        files = big_checkpoint()
        hub.add(REPO, files)
        hub.holds[WEIGHTS] = [2_000_000] + [0] * 4  # the read timeout may end the first

        async def cancel_when_held() -> None:
            task = asyncio.create_task(download(REPO, None, tmp_path / "m", lambda *_: None))
            await asyncio.to_thread(wait_for_part, tmp_path / "m", 2_000_000)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel_when_held())
        assert not any(thread.name.startswith("download") for thread in threading.enumerate())
        (part,) = (tmp_path / "m" / PART_FOLDER).glob("model*")
        assert part.stat().st_size == 2_000_000
        hub.released.set()
        assert visible(fetch(tmp_path / "m")) == files


def test_a_repository_has_no_say_in_the_notes_about_its_download(
    hub: FakeHub, tmp_path: Path
) -> None:
    files = samples.checkpoint()
    false_note = Manifest(REPO, None, "0" * 40, (), complete=True)
    hub.add(REPO, files | {MANIFEST_FILE: json.dumps(asdict(false_note)).encode()})
    hub.cuts[WEIGHTS] = [0] * 9
    refusal(Failed, tmp_path / "m")
    manifest = read_manifest(tmp_path / "m")
    assert manifest is not None
    assert not manifest.complete
    assert visible(fetch(tmp_path / "m")) == files
    assert not hub.downloads(MANIFEST_FILE)
