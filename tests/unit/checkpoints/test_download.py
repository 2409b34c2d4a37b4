"""Downloads from a real HTTP server: selection, resuming, progress, refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import pytest

from gpupoold.checkpoints import fetcher as fetcher_module, hub as hub_module
from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.disk_room import KEPT_FREE_BYTES
from gpupoold.checkpoints.download import checkpoint_dir, download
from gpupoold.checkpoints.fetcher import PART_FOLDER
from gpupoold.checkpoints.manifest import MANIFEST_FILE, HubFile, Manifest, read_manifest
from gpupoold.checkpoints.selection import Content
from gpupoold.errors import Failed, GpupoolError, Refused, UsageError
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.fake_hub import FakeHub

ROOT = Path(__file__).parents[3]
REPO = "org/model"
WEIGHTS = "model.safetensors"
BIG = 3_000_000


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "FIRST_RETRY_S", 0.001)


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


class TestWhole:
    @pytest.mark.parametrize("redirects", [False, True])
    def test_single_file_checkpoint(self, redirects: bool, hub: FakeHub, tmp_path: Path) -> None:
        hub.redirects_large_files = redirects
        files = samples.checkpoint()
        commit = hub.add(REPO, files).revisions["main"]
        target = fetch(tmp_path / "m")
        assert visible(target) == files
        assert_complete(target, commit)
        info = check_checkpoint(target, allow_pickle=False, allow_remote_code=False)
        assert info.num_parameters == samples.NUM_ELEMENTS

    def test_same_files_as_the_hub_library(self, hub: FakeHub, tmp_path: Path) -> None:
        """The library itself works with the fake, so the fake is a fair one."""
        from huggingface_hub import snapshot_download

        files = samples.sharded() | {"tokenizer.model": b"\0\1"}
        hub.add(REPO, files)
        hub.redirects_large_files = True
        theirs = snapshot_download(
            REPO, local_dir=tmp_path / "theirs", cache_dir=tmp_path / "cache", endpoint=hub.url
        )
        assert visible(fetch(tmp_path / "ours")) == files
        assert {name: Path(theirs, name).read_bytes() for name in files} == files

    def test_only_what_serving_needs(self, hub: FakeHub, tmp_path: Path) -> None:
        wanted = samples.sharded() | {
            "vocab.txt": b"a",
            "chat_template.jinja": b"{{ x }}",
            "additional_chat_templates/tool.jinja": b"{{ y }}",
            "tokenizer.model.v3": b"\0",
            "qwen.tiktoken": b"aa 0",
        }
        unwanted = {
            "README.md": b"#",
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": samples.weights(),
            "params.json": b"{}",
            "original/model.safetensors": b"x",
            "original/consolidated.00.pth": b"x",
            "modeling_x.py": b"import os",
            "model.gguf": b"x",
        }
        hub.add(REPO, wanted | unwanted)
        assert visible(fetch(tmp_path / "m")) == wanted

    def test_revision(self, hub: FakeHub, tmp_path: Path) -> None:
        repo = hub.add(REPO, samples.checkpoint())
        other = samples.checkpoint(max_position_embeddings=7)
        commit = repo.commit(other, "v/2")
        target = checkpoint_dir(tmp_path, REPO, "v/2")
        assert target == tmp_path / "org--model@v--2"
        assert visible(fetch(target, revision="v/2")) == other
        assert_complete(target, commit)

    def test_progress_in_bytes_in_the_loop(self, hub: FakeHub, tmp_path: Path) -> None:
        files = big_checkpoint()
        hub.add(REPO, files)
        threads: set[threading.Thread] = set()
        reports: list[tuple[int, int]] = []

        def on_progress(done: int, total: int, rate: float | None) -> None:
            threads.add(threading.current_thread())
            reports.append((done, total))

        asyncio.run(download(REPO, None, tmp_path / "m", on_progress))
        total = sum(map(len, files.values()))
        assert reports == sorted(reports)
        assert reports[-1] == (total, total)
        assert threads == {threading.main_thread()}

    def test_token_goes_to_the_hub_only(
        self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", hub.token)
        hub.redirects_large_files = True
        hub.add(REPO, samples.checkpoint(), access="private")
        fetch(tmp_path / "m")
        tokens = {request.path.startswith("/cdn/"): request.token for request in hub.requests}
        assert tokens == {False: hub.token, True: None}


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
            "from gpupoold.checkpoints.download import download\n"
            f"asyncio.run(download({REPO!r}, None, Path(sys.argv[1]), lambda *_: None))"
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

        monkeypatch.setattr("gpupoold.system.durable.replace", full)
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


class TestAdapters:
    FILES: ClassVar = {
        "adapter_config.json": b'{"peft_type": "LORA", "r": 8}',
        "adapter_model.safetensors": b"tensors",
    }

    def test_only_the_adapter_is_fetched(self, hub: FakeHub, tmp_path: Path) -> None:
        others = {"adapter_model.bin": b"", "tokenizer.json": b"{}", "optimizer.pt": b"x"}
        commit = hub.add(REPO, self.FILES | others).revisions["main"]
        target = fetch(tmp_path / "a", content="adapter")
        assert visible(target) == self.FILES
        assert_complete(target, commit)

    def test_its_kind_is_checked_before_its_weights_are_fetched(
        self, hub: FakeHub, tmp_path: Path
    ) -> None:
        hub.add(REPO, self.FILES | {"adapter_config.json": b'{"peft_type": "IA3"}'})
        with pytest.raises(Refused, match="of type 'IA3'"):
            fetch(tmp_path / "a", content="adapter")
        assert "adapter_model.safetensors" not in visible(tmp_path / "a")

    @pytest.mark.parametrize(
        ("files", "content", "text"),
        [
            (FILES, "checkpoint", "has a LoRA adapter, not a model"),
            (samples.checkpoint(), "adapter", "so it is no adapter"),
            ({"adapter_config.json": b"{}"}, "adapter", "has no weights"),
        ],
    )
    def test_the_other_kind_of_repository(
        self, files: dict[str, bytes], content: Content, text: str, hub: FakeHub, tmp_path: Path
    ) -> None:
        hub.add(REPO, files)
        with pytest.raises(Refused, match=text):
            fetch(tmp_path / "a", content=content)

    def test_a_pickle_is_fetched_only_if_allowed(self, hub: FakeHub, tmp_path: Path) -> None:
        files = {
            "adapter_config.json": self.FILES["adapter_config.json"],
            "adapter_model.bin": b"p",
        }
        hub.add(REPO, files)
        with pytest.raises(Refused, match="only in pickle files"):
            fetch(tmp_path / "a", content="adapter")
        assert visible(fetch(tmp_path / "b", content="adapter", allow_pickle=True)) == files
