"""Requests that leave a device without an engine, and come to one: told of when they are there."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gpupoold.simdevice.answers import Answer
from gpupoold.simdevice.migrations import SimMigrations
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel
from tests.unit.simdevice.box import KV_BYTES, PROMPT, Box

SWITCHED_S = 2.0


class Moving:
    """A box whose requests can leave and come; what its moves say goes through a channel."""

    def __init__(self, device: int) -> None:
        self.box = Box("a", "b")
        ours, theirs = socket.socketpair()
        self.daemon: BlockingChannel[Any] = BlockingChannel(ours, m.FromWorker)
        self._channel: BlockingChannel[Any] = BlockingChannel(theirs, m.ToWorker)
        self.migrations = SimMigrations(device, self.box.device, self._channel)

    def run(self, request_id: str, max_tokens: int = 500) -> Answer:
        """A request of model a that is being decoded."""
        answer = self.box.ask("a", request_id, max_tokens)
        self.box.turn("a")
        self.box.at(self.box.now_s + SWITCHED_S)
        assert answer.num_tokens > 1
        return answer

    def migrate_out(self, request_id: str, model: str = "a", *, is_known: bool = True) -> None:
        self.migrations.migrate_out(m.MigrateOut(model, request_id), is_known=is_known)

    def at(self, now_s: float) -> None:
        """As the server does at each round."""
        self.box.at(now_s)
        self.migrations.advance(now_s)

    def heard(self) -> list[Any]:
        """What has been said."""
        messages = []
        while (message := self.daemon.receive(0.0)) is not None:
            messages.append(message)
        return messages

    def kv_bytes(self, model: str = "a") -> tuple[int, int]:
        """On the device and in host memory."""
        _, kv_bytes, host_bytes = self.box.device.memory.held_bytes(model)
        return kv_bytes, host_bytes

    def close(self) -> None:
        self.daemon.close()
        self._channel.close()


@pytest.fixture
def source() -> Iterator[Moving]:
    made = Moving(0)
    yield made
    made.close()


@pytest.fixture
def target() -> Iterator[Moving]:
    made = Moving(1)
    yield made
    made.close()


def taken(answer: Answer) -> Answer:
    """A request as another device gets it."""
    return Answer(
        answer.request_id,
        answer.model,
        answer.arrival_s,
        answer.prompt_tokens,
        answer.max_tokens,
        answer.num_tokens,
    )


def kv_transfer(answer: Answer) -> m.KvTransfer:
    return m.KvTransfer("p", 0, answer.context_tokens, [])


class TestOut:
    def test_it_has_left_when_its_kv_is_in_host_memory(self, source: Moving) -> None:
        answer = source.run("r")
        assert source.kv_bytes() == (answer.context_tokens * KV_BYTES, 0)
        source.migrate_out("r")
        due_s = source.migrations.next_due_s
        assert due_s is not None
        assert due_s > source.box.now_s
        source.at((source.box.now_s + due_s) / 2)
        assert source.heard() == []
        source.at(due_s)
        [moved] = source.heard()
        assert (moved.model, moved.request_id, moved.is_known) == ("a", "r", True)
        assert (moved.kv_transfer.source, moved.kv_transfer.num_blocks) == (
            0,
            answer.context_tokens,
        )
        fd = source.daemon.take_fd()
        assert select.select([fd], [], [], 0)[0] == [fd]  # it is there already
        assert source.kv_bytes() == (0, 0)
        assert source.migrations.next_due_s is None

    def test_it_gets_no_token_any_more(self, source: Moving) -> None:
        answer = source.run("r")
        source.run("stays")
        num_tokens = answer.num_tokens
        source.migrate_out("r")
        source.at(source.box.now_s + 1.0)
        assert len(source.box.tokens("r")) == answer.num_tokens == num_tokens
        assert len(source.box.tokens("stays")) > 50

    def test_ids_are_of_one_kv_transfer_only(self, source: Moving) -> None:
        for name in ("r", "q"):
            source.run(name)
            source.migrate_out(name)
        source.at(source.box.now_s + 1.0)
        assert len({moved.kv_transfer.transfer_id for moved in source.heard()}) == 2

    def test_one_without_a_token_has_no_kv(self, source: Moving) -> None:
        source.box.ask("a", "waits", 5)
        source.migrate_out("waits")
        source.at(source.box.now_s)
        assert source.heard() == [m.Migrated("a", "waits")]

    def test_one_that_is_not_here(self, source: Moving) -> None:
        source.migrate_out("nobody")
        source.migrate_out("r", "unknown", is_known=False)
        assert source.heard() == [
            m.Migrated("a", "nobody", is_known=False),
            m.Migrated("unknown", "r", is_known=False),
        ]
        assert source.migrations.next_due_s is None


class TestIn:
    def test_it_goes_on_where_it_was(self, source: Moving, target: Moving) -> None:
        """Same tokens as where it came from, without another prefill."""
        answer = source.run("r")
        target.run("other")
        target.box.said.clear()
        num_before = answer.num_tokens
        target.migrations.attach(taken(answer), kv_transfer(answer))
        assert target.heard() == [m.KvTransferUsed("p", 0)]
        due_s = target.migrations.next_due_s
        assert due_s is not None
        assert due_s > target.box.now_s  # its KV is fetched: the model is on its turn
        assert target.box.device.counts("a") == (1, 0)
        target.at(due_s)
        assert target.heard() == [m.RequestAttached("a", "r")]
        target.at(due_s + 1.0)
        tokens = target.box.tokens("r")
        assert len(tokens) > 50
        source.box.at(due_s + 2.0)  # as if it had stayed there
        assert tokens == source.box.tokens("r")[num_before : num_before + len(tokens)]

    def test_of_a_model_that_is_not_on_its_turn(self, source: Moving, target: Moving) -> None:
        """It is there at once; its KV comes with the switch to the model."""
        answer = source.run("r")
        coming = taken(answer)
        target.migrations.attach(coming, kv_transfer(answer))
        assert target.kv_bytes() == (0, answer.context_tokens * KV_BYTES)
        target.at(0.0)
        assert target.heard() == [m.KvTransferUsed("p", 0), m.RequestAttached("a", "r")]
        target.box.turn("a")
        target.box.at(SWITCHED_S)
        assert len(target.box.tokens("r")) > 1
        assert target.kv_bytes() == (coming.context_tokens * KV_BYTES, 0)

    def test_without_kv_it_is_prefilled(self, target: Moving) -> None:
        answer = Answer("r", "a", 0.0, PROMPT, 500, 7)
        target.migrations.attach(answer, None)
        assert target.heard() == [m.RequestAttached("a", "r")]
        assert target.migrations.next_due_s is None
        assert target.box.device.counts("a") == (1, 1)

    def test_it_ends_on_the_way(self, source: Moving, target: Moving) -> None:
        answer = source.run("r")
        target.run("other")
        kv_bytes = target.kv_bytes()
        target.migrations.attach(taken(answer), kv_transfer(answer))
        target.migrations.abort(["r", "unknown"])
        assert target.migrations.next_due_s is None
        assert target.kv_bytes() == kv_bytes
        target.migrations.advance(target.box.now_s + 9.0)
        assert target.heard() == [m.KvTransferUsed("p", 0)]

    def test_its_model_goes(self, source: Moving, target: Moving) -> None:
        answer = source.run("r")
        target.run("other")
        target.migrations.attach(taken(answer), kv_transfer(answer))
        assert target.migrations.forget("b") == []
        assert target.migrations.forget("a") == ["r"]
        assert target.migrations.next_due_s is None
        assert target.migrations.forget("a") == []
