"""KV of ended requests after a worker's death, in other workers' memory, and in files."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.rig import weight_bytes
from gpupoold.wire import messages as m
from tests.functional.test_prefix_cache import memory_of, user_turn
from tests.functional.worker_peer import WorkerPeer

pytestmark = pytest.mark.slow  # test_conversations.py has a part of this with a whole daemon

_MODELS = ("tiny-llama", "tiny-qwen3")
_NUM_CONVERSATIONS = 3
_MAX_TOKENS = 12
_BLOCK_TOKENS = 16


@contextmanager
def worker(
    tiny_models: dict[str, Path], identity: str = "as ever", **options: Any
) -> Iterator[WorkerPeer]:
    """A device that holds one and a half models."""
    num_bytes = int(1.5 * max(weight_bytes(tiny_models[name]) for name in _MODELS))
    peer = WorkerPeer(num_bytes, kv_host_bytes=64 << 20, quota_max_s=0.05, **options)
    try:
        for name in _MODELS:
            peer.load(name, tiny_models[name], max_model_len=1024, kv_identity=identity)
        yield peer
    finally:
        if peer.process.poll() is None:
            peer.close()


def ask_all(peer: WorkerPeer, histories: dict[tuple[str, int], list[int]], turn: int) -> None:
    """Ask the next turn of all conversations at once; the answers become history."""
    ids = {}
    for (model, one), history in histories.items():
        history += user_turn(one, turn)
        ids[model, one] = f"{id(peer)}-{model}-{one}-{turn}"
        peer.ask(model, ids[model, one], list(history), max_tokens=_MAX_TOKENS)
    peer.run_until_ended(*ids.values())
    for key, request_id in ids.items():
        histories[key] += peer.tokens[request_id]


def new_histories() -> dict[tuple[str, int], list[int]]:
    return {(model, one): [] for model in _MODELS for one in range(_NUM_CONVERSATIONS)}


@pytest.fixture(scope="module")
def expected(tiny_models: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    """Three turns on one worker."""
    histories = new_histories()
    with worker(tiny_models) as peer:
        for turn in range(3):
            ask_all(peer, histories, turn)
    return histories


def first_turns(peer: WorkerPeer) -> dict[tuple[str, int], list[int]]:
    histories = new_histories()
    for turn in range(2):
        ask_all(peer, histories, turn)
    memory_of(peer)  # by then all KV has been saved
    return histories


def hits(peer: WorkerPeer) -> dict[str, tuple[int, int]]:
    """Bytes found and bytes fetched, by model."""
    return {
        name: (one.prefix_hit_bytes, one.prefix_peer_bytes + one.prefix_file_bytes)
        for name, one in memory_of(peer).items()
    }


def least_bytes(peer: WorkerPeer, histories: dict[tuple[str, int], list[int]]) -> dict[str, int]:
    """The bytes of all whole blocks of the conversations but for their last tokens, by model."""
    sizes = {name: host.kv_bytes_per_token for name, host in peer.loaded.items()}
    least = dict.fromkeys(_MODELS, 0)
    for (model, _), history in histories.items():
        least[model] += (len(history) - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS * sizes[model]
    return least


Histories = dict[tuple[str, int], list[int]]


def go_on_after_a_death(
    tiny_models: dict[str, Path], identity: str
) -> tuple[Histories, dict[str, int], dict[str, tuple[int, int]]]:
    """Conversations whose worker is killed before the last turn, which the next worker answers.

    Returns the histories, the least bytes that the turn could find, and the bytes found.
    """
    with worker(tiny_models) as dead:
        histories = first_turns(dead)
        os.kill(dead.process.pid, signal.SIGKILL)
        dead.process.wait()
        with worker(tiny_models, identity, former=dead) as peer:
            least = least_bytes(peer, histories)
            ask_all(peer, histories, 2)
            found = hits(peer)
        dead.forget()
    return histories, least, found


def test_after_the_death_of_a_worker(tiny_models: dict[str, Path], expected: Histories) -> None:
    histories, least, found = go_on_after_a_death(tiny_models, "as ever")
    assert histories == expected
    assert all(found[name][0] >= least[name] > 0 for name in _MODELS)
    assert all(found[name][1] == 0 for name in _MODELS)


def test_an_engine_of_another_identity_finds_nothing(
    tiny_models: dict[str, Path], expected: Histories
) -> None:
    histories, _, found = go_on_after_a_death(tiny_models, "another checkpoint")
    assert histories == expected
    assert set(found.values()) == {(0, 0)}


def test_in_the_memory_of_another_worker(
    tiny_models: dict[str, Path], expected: dict[tuple[str, int], list[int]]
) -> None:
    with worker(tiny_models) as first, worker(tiny_models) as second:
        assert first.kv_host_fd is not None
        second.channel.send(m.PrefixPeer(0), (first.kv_host_fd,))
        histories = first_turns(first)
        least = least_bytes(second, histories)
        ask_all(second, histories, 2)
        found = hits(second)
        assert histories == expected
        assert all(found[name][1] >= least[name] > 0 for name in _MODELS)
        assert all(found[name][0] >= found[name][1] for name in _MODELS)
        # What has been fetched is the worker's own from then on.
        for name in _MODELS:
            first.channel.send(m.ForgetPrefixes(name))
        while first.wait(m.WorkerStatus).activity.prefix_bytes:
            pass
        for name in _MODELS:  # KV that is still on the device is found there, without a copy
            second.call("page_out", model=name)
        before = hits(second)
        ask_all(second, histories, 3)
        after = hits(second)
        assert all(after[name][1] == before[name][1] for name in _MODELS)
        assert all(after[name][0] > before[name][0] for name in _MODELS)


class TestFiles:
    @staticmethod
    def options(folder: Path) -> dict[str, object]:
        return {"--kv-files": folder, "--kv-files-bytes": 64 << 20}

    def written(
        self, tiny_models: dict[str, Path], folder: Path
    ) -> dict[tuple[str, int], list[int]]:
        """The conversations of a worker that has written all of its KV."""
        with worker(tiny_models, options=self.options(folder)) as peer:
            histories = first_turns(peer)
            num_bytes = -1
            while num_bytes != (now_bytes := size_of(folder)):
                num_bytes = now_bytes
                memory_of(peer)
            os.kill(peer.process.pid, signal.SIGKILL)
            peer.process.wait()
            peer.forget()
        return histories

    def test_another_process_finds_them(
        self,
        tiny_models: dict[str, Path],
        expected: dict[tuple[str, int], list[int]],
        tmp_path: Path,
    ) -> None:
        histories = self.written(tiny_models, tmp_path)
        with worker(tiny_models, options=self.options(tmp_path)) as peer:
            least = least_bytes(peer, histories)
            ask_all(peer, histories, 2)
            found = hits(peer)
        assert histories == expected
        assert all(found[name][1] >= least[name] > 0 for name in _MODELS)
        assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*"))

    def test_damaged_files_are_not_used(
        self,
        tiny_models: dict[str, Path],
        expected: dict[tuple[str, int], list[int]],
        tmp_path: Path,
    ) -> None:
        histories = self.written(tiny_models, tmp_path)
        for path in tmp_path.rglob("*"):
            if path.is_file():
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
        with worker(tiny_models, options=self.options(tmp_path)) as peer:
            ask_all(peer, histories, 2)
        assert histories == expected


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
