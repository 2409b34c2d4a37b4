"""Both kinds of channel over real socket pairs: order, descriptors, back-pressure, death."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import pytest

from gpupoold.wire import messages as m
from gpupoold.wire.channel import (
    AsyncChannel,
    BlockingChannel,
    ChannelClosed,
    DescriptorsLost,
    encode_frame,
)
from tests.unit.descriptors import open_descriptors, opened_since
from tests.unit.wire.samples import LOADED, MESSAGES, MODEL

T = TypeVar("T")

Both = tuple[AsyncChannel[m.FromWorker], BlockingChannel[m.ToWorker]]
TO_INSTANCE = [message for message in MESSAGES if isinstance(message, m.ToWorker)]
FROM_INSTANCE = [message for message in MESSAGES if isinstance(message, m.FromWorker)]


@contextlib.asynccontextmanager
async def channels() -> AsyncIterator[Both]:
    """A daemon's end and a worker's; no descriptor is left afterwards."""
    before = open_descriptors()
    ours, theirs = socket.socketpair()
    daemon: AsyncChannel[m.FromWorker] = AsyncChannel(ours, m.FromWorker)
    worker: BlockingChannel[m.ToWorker] = BlockingChannel(theirs, m.ToWorker)
    try:
        yield daemon, worker
    finally:
        daemon.close()
        worker.close()
        await asyncio.sleep(0)
    assert not opened_since(before)


def memfd(text: str) -> int:
    fd = os.memfd_create(text)
    os.write(fd, text.encode())
    return fd


def content(fd: int) -> str:
    """What the memfd holds; closes it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read().decode()


async def soon(coroutine: Awaitable[T]) -> T:
    async with asyncio.timeout(10):
        return await coroutine


async def test_every_message_both_ways() -> None:
    async with channels() as (daemon, worker):
        for message in TO_INSTANCE:
            daemon.send(message)
        assert [worker.receive(5.0) for _ in TO_INSTANCE] == TO_INSTANCE
        for answer in FROM_INSTANCE:
            worker.send(answer)
        assert [await soon(daemon.receive()) for _ in FROM_INSTANCE] == FROM_INSTANCE


async def test_descriptors_come_in_order_with_their_messages() -> None:
    async with channels() as (daemon, worker):
        for number in range(5):
            fd = memfd(f"image {number}")
            daemon.send(m.UnloadModel(f"before {number}"))
            daemon.send(m.LoadModel(MODEL, True, str(number)), (fd,))
            os.close(fd)
        daemon.send(m.Shutdown())
        for number in range(5):
            assert worker.receive(5.0) == m.UnloadModel(f"before {number}")
            assert worker.receive(5.0) == m.LoadModel(MODEL, True, str(number))
            assert content(worker.take_fd()) == f"image {number}"
        assert worker.receive(5.0) == m.Shutdown()


async def test_descriptors_to_the_daemon_even_read_late() -> None:
    async with channels() as (daemon, worker):
        for number in range(5):
            fd = memfd(f"image {number}")
            worker.send(m.ModelLoaded(LOADED, str(number), True), (fd,))
            worker.send(m.ModelUnloaded(str(number)))
            os.close(fd)
        await asyncio.sleep(0.05)  # all are in the daemon's queue now
        for number in range(5):
            loaded = await soon(daemon.receive())
            assert loaded == m.ModelLoaded(LOADED, str(number), True)
            fd = daemon.take_fd()
            assert not os.get_inheritable(fd)
            assert content(fd) == f"image {number}"
            assert await soon(daemon.receive()) == m.ModelUnloaded(str(number))


async def test_received_descriptors_are_not_inherited() -> None:
    async with channels() as (daemon, worker):
        fd = memfd("snapshot")
        daemon.send(m.LoadModel(MODEL, True), (fd,))
        worker.receive(5.0)
        received = worker.take_fd()
        assert not os.get_inheritable(received)
        os.close(received)
        os.close(fd)


async def test_descriptors_that_nobody_takes_are_closed() -> None:
    async with channels() as (daemon, worker):  # checks for leaks
        fd = memfd("snapshot")
        daemon.send(m.LoadModel(MODEL, True), (fd,))
        worker.send(m.ModelLoaded(LOADED, "", True), (fd,))
        os.close(fd)
        assert worker.receive(5.0)
        assert await soon(daemon.receive())


async def test_descriptors_of_unsent_messages_are_closed() -> None:
    async with channels() as (daemon, _):
        fd = memfd("snapshot")
        daemon.send(m.LoadModel(MODEL, False, "x" * (8 << 20)))
        daemon.send(m.LoadModel(MODEL, True), (fd,))
        os.close(fd)


async def test_big_frames_wait_for_a_slow_reader_without_blocking() -> None:
    async with channels() as (daemon, worker):
        big = [m.AddRequest("m", str(n), 0.0, 0, 1, [bytes([n]) * (3 << 20)]) for n in range(4)]
        for message in big:  # ends without a reader
            daemon.send(message)
        fd = memfd("after the big ones")
        daemon.send(m.LoadModel(MODEL, True), (fd,))
        os.close(fd)
        reader = asyncio.to_thread(lambda: [worker.receive(5.0) for _ in range(5)])
        assert await soon(reader) == [*big, m.LoadModel(MODEL, True)]
        assert content(worker.take_fd()) == "after the big ones"


def send_all(channel: BlockingChannel[m.ToWorker], messages: list[m.StepOutputs]) -> None:
    for message in messages:
        channel.send(message)


async def test_big_frames_from_a_blocking_sender() -> None:
    async with channels() as (daemon, worker):
        big = [m.StepOutputs("m", n, [bytes([n]) * (3 << 20)], []) for n in range(3)]
        sender = asyncio.create_task(asyncio.to_thread(send_all, worker, big))
        received = [await soon(daemon.receive()) for _ in big]
        await soon(sender)
        assert received == big


async def test_both_send_big_frames_at_once() -> None:
    async with channels() as (daemon, worker):
        request = m.AddRequest("m", "r", 0.0, 0, 1, [b"a" * (4 << 20)])
        outputs = m.StepOutputs("m", 0.0, [b"b" * (4 << 20)], [])

        def work() -> m.ToWorker | None:
            worker.send(outputs)
            return worker.receive(5.0)

        daemon.send(request)
        working = asyncio.create_task(asyncio.to_thread(work))
        assert await soon(daemon.receive()) == outputs
        assert await soon(working) == request


async def test_a_forwarded_frame_is_not_encoded_again() -> None:
    async with channels() as (daemon, worker):
        daemon.send_frame(encode_frame(m.UnloadModel("x")))
        assert worker.receive(5.0) == m.UnloadModel("x")


async def test_receive_times_out() -> None:
    async with channels() as (daemon, worker):
        assert worker.receive(0.0) is None
        started_s = time.monotonic()
        assert worker.receive(0.05) is None
        assert time.monotonic() - started_s >= 0.04
        daemon.send(m.Shutdown())
        assert worker.receive(None) == m.Shutdown()


async def test_half_a_frame_is_not_a_message() -> None:
    ours, theirs = socket.socketpair()
    worker: BlockingChannel[m.ToWorker] = BlockingChannel(theirs, m.ToWorker)
    frame = encode_frame(m.UnloadModel("x"))
    ours.send(frame[:7])
    assert worker.receive(0.0) is None
    ours.send(frame[7:])
    assert worker.receive(0.0) == m.UnloadModel("x")
    ours.close()
    worker.close()


async def test_closing_is_seen_after_what_was_sent_before() -> None:
    async with channels() as (daemon, worker):
        daemon.send(m.UnloadModel("x"))
        worker.send(m.ModelUnloaded("y"))
        daemon.close()
        assert daemon.closed
        assert worker.receive(5.0) == m.UnloadModel("x")
        with pytest.raises(ChannelClosed):
            worker.receive(5.0)
        with pytest.raises(ChannelClosed):
            worker.send(m.ModelUnloaded("z"))
        with pytest.raises(ChannelClosed):
            daemon.send(m.Shutdown())
        daemon.close()


async def test_every_receive_after_the_end_raises() -> None:
    async with channels() as (daemon, worker):
        worker.send(m.ModelUnloaded("last"))
        waiting = [asyncio.create_task(daemon.receive()) for _ in range(3)]
        await asyncio.sleep(0)
        worker.close()
        results = await soon(asyncio.gather(*waiting, return_exceptions=True))
        assert results[0] == m.ModelUnloaded("last")
        assert all(isinstance(result, ChannelClosed) for result in results[1:])
        with pytest.raises(ChannelClosed):
            await soon(daemon.receive())
        assert daemon.closed


async def test_last_words_of_a_dead_peer_are_read_though_sending_to_it_failed() -> None:
    async with channels() as (daemon, worker):
        fd = memfd("snapshot")
        for number in range(3):
            worker.send(m.ModelLoaded(LOADED, str(number), True), (fd,))
        os.close(fd)
        worker.close()
        daemon.send(m.Shutdown())  # finds out, before anything was read
        assert daemon.closed
        for number in range(3):
            assert await soon(daemon.receive()) == m.ModelLoaded(LOADED, str(number), True)
            await asyncio.sleep(0.01)  # the end of the stream is read meanwhile
            assert content(daemon.take_fd()) == "snapshot"
        with pytest.raises(ChannelClosed):
            await soon(daemon.receive())


async def test_garbage_closes_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    daemon: AsyncChannel[m.FromWorker] = AsyncChannel(ours, m.FromWorker)
    theirs.send(encode_frame(m.ModelUnloaded("good")))
    assert await soon(daemon.receive()) == m.ModelUnloaded("good")
    theirs.send(b"\xff\xff\xff\xff")
    with pytest.raises(ChannelClosed):
        await soon(daemon.receive())
    assert "over the limit" in caplog.text
    assert theirs.recv(1) == b""
    theirs.close()
    daemon.close()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
def test_garbage_to_a_blocking_channel(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    worker: BlockingChannel[m.ToWorker] = BlockingChannel(theirs, m.ToWorker)
    ours.send(garbage)
    with pytest.raises(ChannelClosed):
        worker.receive(1.0)
    ours.close()
    worker.close()


def test_lost_descriptors_are_those_of_one_message() -> None:
    ours, theirs = socket.socketpair()
    worker: BlockingChannel[m.ToWorker] = BlockingChannel(theirs, m.ToWorker)
    fd, last = memfd("snapshot"), memfd("last")
    socket.send_fds(ours, [encode_frame(m.LoadModel(MODEL, True))], [fd] * 17)
    socket.send_fds(ours, [encode_frame(m.LoadModel(MODEL, True))], [last])
    before = open_descriptors()
    assert worker.receive(1.0)
    came = [worker.take_fd() for _ in range(16)]
    with pytest.raises(DescriptorsLost, match="descriptors of a message were lost"):
        worker.take_fd()
    for one in came:
        os.close(one)
    assert worker.receive(1.0)
    assert content(worker.take_fd()) == "last"
    assert not opened_since(before)
    os.close(fd)
    os.close(last)
    ours.close()
    worker.close()


async def test_descriptors_that_cannot_be_duplicated_are_not_leaked() -> None:
    async with channels() as (daemon, worker):  # checks for leaks
        fd = memfd("snapshot")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(fd)
        os.close(free)
        # One more descriptor may be opened, and two are asked for.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                daemon.send(m.LoadModel(MODEL, True), (fd, fd))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        daemon.send(m.LoadModel(MODEL, True), (fd,))
        os.close(fd)
        assert worker.receive(5.0)
        assert content(worker.take_fd()) == "snapshot"


def test_a_descriptor_beyond_those_of_select() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1024)
        worker: BlockingChannel[m.ToWorker] = BlockingChannel(
            socket.socket(fileno=high), m.ToWorker
        )
        assert worker.receive(0.0) is None
        ours.sendall(encode_frame(m.PeerDown(3)))
        assert worker.receive(5.0) == m.PeerDown(3)
        worker.close()


async def test_a_killed_process_closes_its_channel(project_env: dict[str, str]) -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair()
    script = f"""
import os, socket, signal
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel
channel = BlockingChannel(socket.socket(fileno={theirs.fileno()}), m.ToWorker)
fd = os.memfd_create("snapshot")
channel.send(m.ModelLoaded(channel.receive(None).model and m.LoadedModel(
    name="x", architecture="a", max_model_len=1, dtype="d", block_size=1, num_gpu_blocks=1,
    weight_bytes=1, kv_bytes_per_token=1, supported_tasks=()), "d", True), (fd,))
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=project_env, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        daemon: AsyncChannel[m.FromWorker] = AsyncChannel(ours, m.FromWorker)
        daemon.send(m.LoadModel(MODEL))
        assert isinstance(await soon(daemon.receive()), m.ModelLoaded)
        with pytest.raises(ChannelClosed):
            await soon(daemon.receive())
        os.close(daemon.take_fd())
        with contextlib.suppress(ChannelClosed):
            daemon.send(m.Shutdown())
        daemon.close()
        assert process.wait(10) == -9
    assert not opened_since(before)


def test_a_blocked_sender_learns_of_the_death() -> None:
    ours, theirs = socket.socketpair()
    worker: BlockingChannel[m.ToWorker] = BlockingChannel(theirs, m.ToWorker)
    timer = threading.Timer(0.1, ours.close)
    timer.start()
    with pytest.raises(ChannelClosed):
        worker.send(m.StepOutputs("m", 0.0, [bytes(16 << 20)], []))
    timer.join()
    worker.close()
