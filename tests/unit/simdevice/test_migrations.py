"""Requests that leave a device without an engine, and come to one: told of when they are there."""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpupoold.sim.live import SimLive
from gpupoold.sim.workloads import SimRequest
from gpupoold.wire import messages as m
from tests.unit.simdevice.box import KV_BYTES, PROMPT, STEP_S, Box

SWITCHED_S = 2.0
MOVES = (m.Migrated, m.RequestAttached, m.KvTransferUsed)


class Moving(Box):
    """A box whose requests can leave and come."""

    def __init__(self, number: int, kv_host_bytes: int | None = None) -> None:
        super().__init__("a", "b", number=number, kv_host_bytes=kv_host_bytes)

    def run(self, request_id: str, max_tokens: int = 500) -> SimLive:
        """A request of model a that is being decoded."""
        live = self.ask("a", request_id, max_tokens)
        self.turn("a")
        self.at(self.now_s + SWITCHED_S)
        assert live.num_tokens > 1
        return live

    def migrate_out(self, request_id: str, model: str = "a") -> None:
        self.device.migrate_out(m.MigrateOut(model, request_id))

    def received(self) -> list[Any]:
        """What has been said of moves."""
        messages = [one for one in self.sent if isinstance(one, MOVES)]
        self.sent.clear()
        return messages

    def kv_bytes(self, model: str = "a") -> tuple[int, int]:
        """On the device and in host memory."""
        _, kv_bytes, host_bytes = self.sim.memory.held_bytes(model)
        return kv_bytes, host_bytes


@pytest.fixture
def source() -> Iterator[Moving]:
    made = Moving(0)
    yield made
    made.sim.check_memory()


@pytest.fixture
def target() -> Iterator[Moving]:
    made = Moving(1)
    yield made
    made.sim.check_memory()


def taken(live: SimLive) -> SimLive:
    """A request as another device gets it."""
    num_before = live.num_tokens
    request = replace(
        live.request,
        prompt_tokens=live.request.prompt_tokens + num_before,
        output_tokens=live.request.output_tokens - num_before,
    )
    return SimLive(request, num_before=num_before)


def kv_transfer(live: SimLive) -> m.KvTransfer:
    return m.KvTransfer("p", 0, live.context_tokens, [], live.context_tokens)


class TestOut:
    def test_without_host_memory_it_leaves_without_kv(self) -> None:
        source = Moving(0, kv_host_bytes=0)
        source.run("r")
        source.received()
        source.migrate_out("r")
        assert source.received() == [m.Migrated("a", "r")]
        assert source.kv_bytes() == (0, 0)
        source.sim.check_memory()

    def test_it_has_left_when_its_kv_is_in_host_memory(self, source: Moving) -> None:
        live = source.run("r")
        assert source.kv_bytes() == (live.context_tokens * KV_BYTES, 0)
        source.migrate_out("r")
        left_s = source.now_s + live.context_tokens * KV_BYTES / 10e9
        source.at((source.now_s + left_s) / 2)
        assert source.received() == []
        source.at(left_s + STEP_S / 10)
        [moved] = source.received()
        assert (moved.model, moved.request_id, moved.is_known) == ("a", "r", True)
        assert (moved.kv_transfer.source, moved.kv_transfer.num_blocks) == (0, live.context_tokens)
        [fd] = source.fds
        assert select.select([fd], [], [], 0)[0] == [fd]  # it is there already
        assert source.kv_bytes() == (0, 0)
        source.at(source.now_s + STEP_S)
        assert source.device.next_due_s is None

    def test_it_gets_no_token_any_more(self, source: Moving) -> None:
        live = source.run("r")
        source.run("stays")
        num_tokens = live.num_tokens
        source.migrate_out("r")
        source.at(source.now_s + 1.0)
        assert len(source.tokens("r")) == live.num_tokens == num_tokens
        assert len(source.tokens("stays")) > 50

    def test_ids_are_of_one_kv_transfer_only(self, source: Moving) -> None:
        for name in ("r", "q"):
            source.run(name)
            source.migrate_out(name)
        source.at(source.now_s + 1.0)
        assert len({moved.kv_transfer.transfer_id for moved in source.received()}) == 2

    @pytest.mark.parametrize("num_before", [0, 7])
    def test_one_that_is_not_prefilled_has_no_kv(self, source: Moving, num_before: int) -> None:
        waits = SimLive(SimRequest("waits", "a", 0.0, PROMPT, 5), num_before=num_before)
        source.device.add(waits)
        source.migrate_out("waits")
        source.at(source.now_s)
        assert source.received() == [m.Migrated("a", "waits")]

    def test_one_that_is_not_here(self, source: Moving) -> None:
        source.migrate_out("nobody")
        source.migrate_out("r", "unknown")
        assert source.received() == [
            m.Migrated("a", "nobody", is_known=False),
            m.Migrated("unknown", "r", is_known=False),
        ]
        assert source.device.next_due_s is None


class TestIn:
    def test_it_goes_on_where_it_was(self, source: Moving, target: Moving) -> None:
        """Same tokens as where it came from, without another prefill."""
        live = source.run("r")
        target.run("other")
        target.sent.clear()
        num_before = live.num_tokens
        kv_s = live.context_tokens * KV_BYTES / 10e9
        target.device.add_migrated(taken(live), kv_transfer(live))
        assert target.received() == [m.KvTransferUsed("p", 0)]
        assert len(target.sim.requests.present("a")) == 1
        target.at(target.now_s + kv_s / 2)  # its KV is fetched: the model is on its turn
        assert target.received() == []
        target.at(target.now_s + kv_s)
        assert target.received() == [m.RequestAttached("a", "r")]
        joined_s = target.now_s
        target.at(joined_s + 1.0)
        tokens = target.tokens("r")
        assert len(tokens) > 50
        source.at(joined_s + 2.0)  # as if it had stayed there
        assert tokens == source.tokens("r")[num_before : num_before + len(tokens)]

    def test_of_a_model_that_is_not_on_its_turn(self, source: Moving, target: Moving) -> None:
        """It is there at once; its KV comes with the switch to the model."""
        live = source.run("r")
        coming = taken(live)
        target.device.add_migrated(coming, kv_transfer(live))
        assert target.kv_bytes() == (0, live.context_tokens * KV_BYTES)
        target.at(0.0)
        assert target.received() == [m.KvTransferUsed("p", 0), m.RequestAttached("a", "r")]
        target.turn("a")
        target.at(SWITCHED_S)
        assert len(target.tokens("r")) > 1
        assert target.kv_bytes() == (coming.context_tokens * KV_BYTES, 0)

    def test_without_kv_it_is_prefilled(self, target: Moving) -> None:
        live = SimLive(SimRequest("r", "a", 0.0, PROMPT + 7, 493), num_before=7)
        target.device.add_migrated(live, None)
        assert target.received() == [m.RequestAttached("a", "r")]
        assert target.device.next_due_s is None
        assert target.sim.requests.present("a") == target.sim.requests.unprefilled("a") == [live]

    def test_it_ends_on_the_way(self, source: Moving, target: Moving) -> None:
        live = source.run("r")
        target.run("other")
        target.sent.clear()
        target.device.add_migrated(taken(live), kv_transfer(live))
        target.device.abort(["r", "unknown"])
        [other] = target.sim.requests.all("a")
        assert target.kv_bytes() == (other.context_tokens * KV_BYTES, 0)
        target.at(target.now_s + 1.0)
        assert target.received() == [m.KvTransferUsed("p", 0)]

    def test_its_model_goes(self, source: Moving, target: Moving) -> None:
        live = source.run("r")
        target.run("other")
        target.device.add_migrated(taken(live), kv_transfer(live))
        assert target.device.remove_model("b") == []
        assert sorted(target.device.remove_model("a")) == ["other", "r"]
        target.at(target.now_s + 1.0)
        assert target.device.next_due_s is None
