"""Downloads from a real HTTP server: selection and progress, and adapters."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.download import checkpoint_dir
from gpupoold.checkpoints.fetcher import DownloadProgress
from gpupoold.checkpoints.layout import Content
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.download_tools import (
    REPO,
    assert_complete,
    big_checkpoint,
    download,
    fetch,
    visible,
)
from tests.unit.checkpoints.fake_hub import FakeHub


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


class Reports:
    def __init__(self, total_bytes: int) -> None:
        self.now_s = 100.0
        self.seen: list[tuple[int, int, float | None]] = []
        self.progress = DownloadProgress(
            total_bytes, lambda *report: self.seen.append(report), clock=lambda: self.now_s
        )

    def receive(self, num_bytes: int, after_s: float) -> None:
        self.now_s += after_s
        self.progress.received(num_bytes)


def test_the_rate_is_of_bytes_that_arrive_now() -> None:
    reports = Reports(10_000)
    reports.progress.found(5_000)
    for _ in range(4):
        reports.receive(500, 1.0)
    assert reports.seen[0] == (5_000, 10_000, None)
    assert reports.seen[-1] == (7_000, 10_000, 500.0)


def test_the_rate_forgets_what_was_long_ago() -> None:
    reports = Reports(1_000_000)
    reports.progress.found(0)
    for _ in range(20):
        reports.receive(1000, 1.0)
    for _ in range(30):
        reports.receive(10, 1.0)
    rate = reports.seen[-1][2]
    assert rate is not None
    assert 9.0 <= rate <= 11.0


def test_a_part_that_starts_over_takes_bytes_back_but_no_rate() -> None:
    reports = Reports(1000)
    reports.receive(400, 1.0)
    reports.receive(400, 1.0)
    reports.now_s += 1.0
    reports.progress.found(-800)
    assert reports.seen[-1][0] == 0
    assert (reports.seen[-1][2] or 0.0) >= 0.0


def test_reports_are_rare_but_the_last_one_comes() -> None:
    reports = Reports(1000)
    for _ in range(1000):
        reports.receive(1, 0.001)
    assert len(reports.seen) < 20
    assert reports.seen[-1][:2] == (1000, 1000)
