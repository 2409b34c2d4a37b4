"""Copies beside the main thread: in order, whole, and stopped at a chunk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gpupoold.memory.transfers import CHUNK_BYTES, Copy, TransferQueue


class Link:
    """Takes note of copies; each chunk waits for a permit once ``is_gated``."""

    def __init__(self) -> None:
        self.chunks: list[Copy] = []
        self.is_gated = False
        self.permits = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)
        self.fails_at = -1

    def copy_in(self, target: int, source: int, num_bytes: int) -> None:
        self.waiting.release()
        if self.is_gated:
            self.permits.acquire()
        if len(self.chunks) == self.fails_at:
            raise OSError("the link is broken")
        self.chunks.append(Copy(target, source, num_bytes))


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def queue(link: Link) -> Iterator[TransferQueue]:
    queue = TransferQueue(link.copy_in, "copy-in")
    yield queue
    queue.close()


def test_chunks_cover_the_copy(link: Link, queue: TransferQueue) -> None:
    transfer = queue.begin(Copy(1000, 5000, 2 * CHUNK_BYTES + 7))
    transfer.wait()
    assert transfer.has_ended
    assert link.chunks == [
        Copy(1000, 5000, CHUNK_BYTES),
        Copy(1000 + CHUNK_BYTES, 5000 + CHUNK_BYTES, CHUNK_BYTES),
        Copy(1000 + 2 * CHUNK_BYTES, 5000 + 2 * CHUNK_BYTES, 7),
    ]
    assert transfer.stop() == 2 * CHUNK_BYTES + 7


def test_one_behind_the_other(link: Link, queue: TransferQueue) -> None:
    transfers = [queue.begin(Copy(number, 0, 1)) for number in range(5)]
    for transfer in transfers:
        transfer.wait()
    assert [copy.target for copy in link.chunks] == [0, 1, 2, 3, 4]


def test_stopped_at_the_chunk_under_way(link: Link, queue: TransferQueue) -> None:
    link.is_gated = True
    transfer = queue.begin(Copy(0, 0, 4 * CHUNK_BYTES))
    link.permits.release()
    for _ in range(2):
        link.waiting.acquire()  # the second chunk has begun
    assert not transfer.has_ended
    threading.Timer(0.05, link.permits.release).start()
    assert transfer.stop() == 2 * CHUNK_BYTES
    assert len(link.chunks) == 2
    transfer.wait()


def test_stopped_before_it_began_it_waits_for_nobody(link: Link, queue: TransferQueue) -> None:
    link.is_gated = True
    first = queue.begin(Copy(0, 0, 1))
    second = queue.begin(Copy(1, 0, 1))
    assert second.stop() == 0
    assert second.has_ended
    link.permits.release()
    first.wait()
    queue.begin(Copy(2, 0, 1))
    link.permits.release()
    queue.close()
    assert [copy.target for copy in link.chunks] == [0, 2]
    queue = TransferQueue(link.copy_in, "another")
    queue.close()


def test_an_error_is_raised_where_it_is_waited_for(link: Link, queue: TransferQueue) -> None:
    link.fails_at = 1
    transfer = queue.begin(Copy(0, 0, 3 * CHUNK_BYTES))
    with pytest.raises(OSError, match="the link is broken"):
        transfer.wait()
    assert transfer.stop() == CHUNK_BYTES
    link.fails_at = -1
    after = queue.begin(Copy(0, 0, 1))
    after.wait()
