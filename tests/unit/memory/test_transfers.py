"""Copies beside the main thread: in order, whole, and stopped at an extent."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence

import pytest

from gpupoold.memory.device import Copy
from gpupoold.memory.transfers import BATCH_BYTES, TransferQueue


class Link:
    """A copy stream that takes note of batches; each waits for a permit once ``is_gated``."""

    def __init__(self) -> None:
        self.batches: list[list[Copy]] = []
        self.is_gated = False
        self.permits = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)
        self.fails_at = -1
        self.num_fences = 0
        self.afters: list[int] = []
        self.num_under_way = self.max_under_way = 0
        self.is_closed = False

    @property
    def extents(self) -> list[Copy]:
        return [copy for batch in self.batches for copy in batch]

    def fence(self) -> int:
        self.num_fences += 1
        return self.num_fences

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        self.waiting.release()
        if self.is_gated:
            self.permits.acquire()
        if len(self.batches) == self.fails_at:
            raise OSError("the link is broken")
        self.batches.append(list(copies))
        self.afters.append(after)
        self.num_under_way += 1
        self.max_under_way = max(self.max_under_way, self.num_under_way)
        return len(self.batches)

    def wait(self, batch: int) -> None:
        assert batch == len(self.batches) - self.num_under_way + 1, "waited for out of order"
        self.num_under_way -= 1

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def queue(link: Link) -> Iterator[TransferQueue]:
    queue = TransferQueue([link], "copy-in")
    yield queue
    queue.close()
    assert link.is_closed


def test_extents_cover_the_copy(link: Link, queue: TransferQueue) -> None:
    transfer = queue.begin([Copy(1000, 5000, 2 * BATCH_BYTES + 7)])
    transfer.wait()
    assert transfer.has_ended
    assert link.extents == [
        Copy(1000, 5000, BATCH_BYTES),
        Copy(1000 + BATCH_BYTES, 5000 + BATCH_BYTES, BATCH_BYTES),
        Copy(1000 + 2 * BATCH_BYTES, 5000 + 2 * BATCH_BYTES, 7),
    ]
    assert transfer.stop() == 2 * BATCH_BYTES + 7


def test_one_behind_the_other(link: Link, queue: TransferQueue) -> None:
    transfers = [queue.begin([Copy(number, 0, 1)]) for number in range(5)]
    for transfer in transfers:
        transfer.wait()
    assert [copy.target for copy in link.extents] == [0, 1, 2, 3, 4]


def test_stopped_at_the_extent_under_way(link: Link, queue: TransferQueue) -> None:
    link.is_gated = True
    transfer = queue.begin([Copy(0, 0, 4 * BATCH_BYTES)])
    link.permits.release()
    for _ in range(2):
        link.waiting.acquire()  # the second extent has begun
    assert not transfer.has_ended
    threading.Timer(0.05, link.permits.release).start()
    assert transfer.stop() == 2 * BATCH_BYTES
    assert len(link.extents) == 2
    transfer.wait()


def test_stopped_before_it_began_it_waits_for_nobody(link: Link, queue: TransferQueue) -> None:
    link.is_gated = True
    first = queue.begin([Copy(0, 0, 1)])
    second = queue.begin([Copy(1, 0, 1)])
    assert second.stop() == 0
    assert second.has_ended
    link.permits.release()
    first.wait()
    queue.begin([Copy(2, 0, 1)])
    link.permits.release()
    queue.close()
    assert [copy.target for copy in link.extents] == [0, 2]
    queue = TransferQueue([link], "another")
    queue.close()


def test_an_error_is_raised_where_it_is_waited_for(link: Link, queue: TransferQueue) -> None:
    link.fails_at = 1
    transfer = queue.begin([Copy(0, 0, 3 * BATCH_BYTES)])
    with pytest.raises(OSError, match="the link is broken"):
        transfer.wait()
    assert transfer.stop() == BATCH_BYTES
    link.fails_at = -1
    after = queue.begin([Copy(0, 0, 1)])
    after.wait()


def test_small_copies_go_together_and_large_ones_in_pieces(
    link: Link, queue: TransferQueue
) -> None:
    third = BATCH_BYTES // 3
    copies = [Copy(number, 100 * number, third) for number in range(7)]
    transfer = queue.begin(copies)
    transfer.wait()
    sizes = [sum(copy.num_bytes for copy in batch) for batch in link.batches]
    assert sizes == [BATCH_BYTES, BATCH_BYTES, 7 * third - 2 * BATCH_BYTES]
    assert sum(sizes) == transfer.num_bytes
    assert link.max_under_way == 2  # the link never waits for the thread


def test_copies_come_after_what_was_launched_when_they_were_asked_for(
    link: Link, queue: TransferQueue
) -> None:
    link.is_gated = True
    first, second = queue.begin([Copy(0, 0, 1)]), queue.begin([Copy(1, 0, 1)])
    assert link.num_fences == 2  # both taken by the asking thread, before any copy
    link.permits.release(2)
    first.wait()
    second.wait()
    assert link.afters == [1, 2]


class TestTransfersInLine:
    """The link has the next transfer's first batch when a transfer's last batch arrives."""

    def test_the_next_begins_before_the_last_has_arrived(self, link: Link) -> None:
        link.is_gated = True
        queue = TransferQueue([link], "copy-in")
        transfers = [queue.begin([Copy(number, 0, 1)]) for number in range(6)]
        link.permits.release(6)
        for transfer in transfers:
            transfer.wait()
        queue.close()
        assert link.max_under_way == 2
        assert [copy.target for copy in link.extents] == list(range(6))
        assert link.afters == [1, 2, 3, 4, 5, 6]

    def test_each_has_its_own_failure_and_its_own_bytes(self) -> None:
        class Broken(Link):
            def begin(self, copies: Sequence[Copy], after: int) -> int:
                if copies[0].target == 1:
                    raise OSError("the link is broken")
                return super().begin(copies, after)

        queue = TransferQueue([Broken()], "copy-in")
        told: dict[int, bool] = {}
        transfers = [
            queue.begin([Copy(number, 0, 1)], functools.partial(told.__setitem__, number))
            for number in range(3)
        ]
        transfers[0].wait()
        with pytest.raises(OSError, match="the link is broken"):
            transfers[1].wait()
        transfers[2].wait()
        queue.close()
        assert [transfer.num_copied_bytes for transfer in transfers] == [1, 0, 1]
        assert told == {0: True, 1: False, 2: True}

    def test_a_listener_that_fails_leaves_the_next_transfer_an_end(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(threading, "excepthook", lambda _: None)

        def fail(_: bool) -> None:
            raise ZeroDivisionError

        link.is_gated = True
        queue = TransferQueue([link], "copy-in")
        failing = queue.begin([Copy(0, 0, 1)], fail)
        following = queue.begin([Copy(1, 0, 3 * BATCH_BYTES)])
        link.permits.release(2)
        failing.wait()
        following.wait()
        assert following.stop() == BATCH_BYTES
        queue.close()

    def test_cores_that_copy_end_each_before_the_next(self, link: Link) -> None:
        queue = TransferQueue([link], "copy-in", helper=Link())
        link.is_gated = True
        transfers = [queue.begin([Copy(number, 0, 1)]) for number in range(3)]
        link.permits.release(3)
        while not transfers[-1].has_ended:
            pass
        queue.close()
        assert link.max_under_way == 1


def test_a_queue_with_much_to_do_has_no_room(link: Link, queue: TransferQueue) -> None:
    link.is_gated = True
    assert queue.has_room
    transfers = [queue.begin([Copy(0, 0, 8 * BATCH_BYTES)]) for _ in range(2)]
    assert not queue.has_room
    link.permits.release(16)
    for transfer in transfers:
        transfer.wait()
    assert queue.has_room


class TestHelper:
    """The thread that waits copies too."""

    def test_it_makes_what_has_not_begun(self, link: Link) -> None:
        helper = Link()
        link.is_gated = True
        queue = TransferQueue([link], "test", helper=helper)
        told: list[bool] = []
        first, second = queue.begin([Copy(1, 0, 1)]), queue.begin([Copy(2, 0, 1)], told.append)
        link.waiting.acquire()  # the first is the queue's thread's
        second.wait()
        assert [copy.target for copy in helper.extents] == [2]
        assert told == [True]
        assert not first.has_ended
        link.permits.release()
        first.wait()
        queue.close()
        assert helper.is_closed

    def test_what_is_waited_for_may_be_behind_others(self, link: Link) -> None:
        helper = Link()
        link.is_gated = True
        queue = TransferQueue([link], "test", helper=helper)
        transfers = [queue.begin([Copy(at, 0, 1)]) for at in (1, 2, 3)]
        link.waiting.acquire()
        transfers[2].wait()
        assert [copy.target for copy in helper.extents] == [2, 3]
        link.permits.release()
        queue.close()
        assert transfers[0].has_ended

    def test_its_errors_are_raised_where_the_transfer_is_waited_for(self, link: Link) -> None:
        helper = Link()
        helper.fails_at = 0
        link.is_gated = True
        queue = TransferQueue([link], "test", helper=helper)
        first, failing, last = (queue.begin([Copy(at, 0, 1)]) for at in (1, 2, 3))
        link.waiting.acquire()
        with pytest.raises(OSError, match="the link is broken"):
            failing.wait()
        helper.fails_at = -1
        last.wait()
        link.permits.release()
        first.wait()
        queue.close()


def test_nothing_to_copy_has_ended_at_once(queue: TransferQueue) -> None:
    transfer = queue.begin([])
    transfer.wait()
    assert transfer.stop() == transfer.num_bytes == 0


def test_the_end_is_told_once_with_whether_all_has_arrived(
    link: Link, queue: TransferQueue
) -> None:
    told: list[bool] = []
    queue.begin([Copy(0, 0, 2 * BATCH_BYTES)], told.append).wait()
    queue.begin([], told.append).wait()
    assert told == [True, True]
    link.fails_at = len(link.batches) + 1  # the second of three
    failing = queue.begin([Copy(0, 0, 3 * BATCH_BYTES)], told.append)
    with pytest.raises(OSError, match="the link is broken"):
        failing.wait()
    assert told == [True, True, False]


def test_the_end_of_a_stopped_transfer_is_told_if_it_had_begun(
    link: Link, queue: TransferQueue
) -> None:
    told: list[str] = []
    link.is_gated = True
    begun = queue.begin([Copy(0, 0, 2 * BATCH_BYTES)], lambda arrived: told.append(f"1 {arrived}"))
    waiting = queue.begin([Copy(0, 0, 1)], lambda arrived: told.append(f"2 {arrived}"))
    link.waiting.acquire()
    begun.cancel()
    waiting.stop()
    link.permits.release()
    begun.wait()
    queue.begin([]).wait()
    assert told == ["1 False"]


def test_nobody_sees_the_end_before_it_has_been_told(queue: TransferQueue) -> None:
    """Who sees it may close what it is told by."""
    may_tell = threading.Event()

    def hold_back(_: bool) -> None:
        may_tell.wait()

    transfer = queue.begin([Copy(0, 0, 1)], hold_back)
    assert not transfer.has_ended
    threading.Timer(0.02, may_tell.set).start()
    transfer.wait()
    assert may_tell.is_set()


def test_a_listener_that_fails_keeps_nobody_waiting(link: Link) -> None:
    """Its thread ends with the error; who waits for the bytes has them."""
    failed = threading.Event()
    thrown: list[BaseException | None] = []

    def note(args: threading.ExceptHookArgs) -> None:
        thrown.append(args.exc_value)
        failed.set()

    def fail(_: bool) -> None:
        raise ZeroDivisionError

    before, threading.excepthook = threading.excepthook, note
    try:
        queue = TransferQueue([link], "copy-in")
        queue.begin([Copy(0, 0, 1)], fail).wait()
        failed.wait()
        queue.close()
    finally:
        threading.excepthook = before
    assert [type(one) for one in thrown] == [ZeroDivisionError]


def test_the_first_bytes_can_be_waited_for(link: Link, queue: TransferQueue) -> None:
    link.is_gated = True
    transfer = queue.begin([Copy(0, 0, 4 * BATCH_BYTES)])
    for _ in range(2):
        link.permits.release()
    transfer.wait_for(BATCH_BYTES)
    assert transfer.num_copied_bytes == BATCH_BYTES
    assert not transfer.has_ended
    for _ in range(2):
        link.permits.release()
    transfer.wait_for(4 * BATCH_BYTES)
    assert transfer.num_copied_bytes == 4 * BATCH_BYTES


def test_an_error_is_raised_where_its_bytes_are_waited_for(
    link: Link, queue: TransferQueue
) -> None:
    link.fails_at = 2
    transfer = queue.begin([Copy(0, 0, 4 * BATCH_BYTES)])
    transfer.wait_for(2 * BATCH_BYTES)
    with pytest.raises(OSError, match="the link is broken"):
        transfer.wait_for(2 * BATCH_BYTES + 1)
    stopped = queue.begin([Copy(0, 0, 4 * BATCH_BYTES)])
    stopped.stop()
    with pytest.raises((AssertionError, OSError)):
        stopped.wait_for(4 * BATCH_BYTES)
