"""Hand-overs: who is told what, whoever dies or ends at whichever moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpupoold.config.sections import DeviceSettings
from gpupoold.domain import FinishReason, Role
from gpupoold.wire import messages as m
from tests.unit.control.requests.migration_box import MODELS, Box, FakeWorker

SOURCE, TARGET, OTHER = 0, 1, 2
LENGTH = 4

# How far a hand-over has come, and who has the request in the end if nothing happens.
TOLD = "the source has been told"
LET_GO = "the source has let it go"
ON_ITS_WAY = "the target has been sent it"
COMING = "the target waits for its KV"
THERE = "its KV is there"
ATTACHED = "the daemon knows"
STAGES = (TOLD, LET_GO, ON_ITS_WAY, COMING, THERE, ATTACHED)
every_stage = pytest.mark.parametrize("stage", STAGES)
has_kv_or_not = pytest.mark.parametrize("has_kv", [True, False], ids=["kv", "no-kv"])


@pytest.fixture
def box() -> Iterator[Box]:
    """One request with a token, on its way from the first worker to the second."""
    made = Box(3)
    for number in (TARGET, OTHER):
        made.dispatcher.set_draining(number, is_draining=True)
    made.ask(LENGTH)
    made.exchange()
    made.workers[SOURCE].step(MODELS[0])
    made.exchange()
    made.dispatcher.set_draining(TARGET, is_draining=False)
    made.dispatcher.set_role(SOURCE, Role.PREFILL)
    made.dispatcher.set_draining(OTHER, is_draining=False)
    made.dispatcher.set_role(OTHER, Role.PREFILL)
    yield made
    made.settle()
    assert list(made.records.ends) == ["r1"]


def bring_to(box: Box, stage: str, *, has_kv: bool = True) -> None:
    """Let the hand-over come so far."""
    source, target = box.workers[SOURCE], box.workers[TARGET]

    def heed_all(worker: FakeWorker) -> None:
        while worker.inbox:
            box.heed(worker.number, has_kv=has_kv)

    def arrive() -> None:
        for request_id in list(target.coming):
            target.arrive(request_id)

    acts: dict[str, Callable[[], object]] = {
        LET_GO: lambda: heed_all(source),
        ON_ITS_WAY: lambda: [box.hear(SOURCE) for _ in list(source.outbox)],
        COMING: lambda: heed_all(target),
        THERE: arrive,
        ATTACHED: lambda: [box.hear(TARGET) for _ in list(target.outbox)],
    }
    assert [type(one) for one in source.inbox].count(m.MigrateOut) == 1
    for act in [acts[one] for one in STAGES[1 : STAGES.index(stage) + 1]]:
        act()
    box.check()


def core_phase(box: Box) -> tuple[str, int | None]:
    """What the core believes of the request."""
    [request] = box.dispatcher.state.requests.values()
    return request.phase.name, request.device


@has_kv_or_not
def test_undisturbed(box: Box, has_kv: bool) -> None:
    assert core_phase(box) == ("MOVING", TARGET)
    bring_to(box, ON_ITS_WAY, has_kv=has_kv)
    order = box.workers[TARGET].inbox[-1]
    assert isinstance(order, m.AddRequest)
    assert (order.is_moving, order.output_token_ids) == (True, [0])
    assert (order.kv_transfer is not None) == has_kv
    assert (core_phase(box), box.migrations.num_migrated) == (("MOVING", TARGET), 0)
    while box.workers[TARGET].inbox:
        box.workers[TARGET].heed()
    if has_kv:
        box.workers[TARGET].arrive("r1")
    box.exchange()
    assert (core_phase(box), box.migrations.num_migrated) == (("DECODING", TARGET), 1)
    assert [one.attached_s for one in box.dispatcher.live.all()] == [box.now_s]
    assert len(box.workers[SOURCE].kv_transfers) == has_kv  # kept as long as it is read
    box.workers[TARGET].use("r1")
    box.exchange()
    assert box.workers[SOURCE].kv_transfers == set()
    box.settle()
    assert box.records.ends == {"r1": FinishReason.LENGTH}


def test_tokens_on_the_way_out_go_with_it(box: Box) -> None:
    """The source goes on until it is told; all that it says before it lets go counts."""
    box.workers[SOURCE].step(MODELS[0])
    bring_to(box, ATTACHED)
    [request] = box.dispatcher.live.all()
    assert request.output_token_ids == [0, 1]
    [known] = box.dispatcher.state.requests.values()
    assert known.num_tokens == 2


def test_an_answer_that_is_through_before_it_is_let_go(box: Box) -> None:
    for _ in range(LENGTH - 1):
        box.workers[SOURCE].step(MODELS[0])
    bring_to(box, ON_ITS_WAY)
    assert box.records.ends == {"r1": FinishReason.LENGTH}
    assert not any(isinstance(one, m.AddRequest) for one in box.workers[TARGET].inbox)


@has_kv_or_not
@every_stage
def test_the_target_dies(box: Box, stage: str, has_kv: bool) -> None:
    bring_to(box, stage, has_kv=has_kv)
    box.die(TARGET, num_heard=0)
    box.check()
    if stage in (TOLD, LET_GO):  # the source has it: nobody else may
        assert box.dispatcher.state.requests == {}
        assert box.dispatcher.nums_of_requests([SOURCE])[0] == 1
    box.exchange()
    assert box.workers[SOURCE].kv_transfers == set()
    assert sum(one.num_places("r1") for one in box.workers) == 1
    box.settle()
    assert box.records.ends == {"r1": FinishReason.LENGTH}


@has_kv_or_not
@every_stage
def test_the_source_dies(box: Box, stage: str, has_kv: bool) -> None:
    bring_to(box, stage, has_kv=has_kv)
    box.die(SOURCE, num_heard=0)
    box.check()
    is_at_target = stage not in (TOLD, LET_GO)
    [request] = box.dispatcher.live.all()
    num_resumed = box.dispatcher.accounts.meters.models[request.model].resumed
    assert num_resumed == (not is_at_target)  # scheduled anew with its token
    assert box.dispatcher.state.requests["r1"].num_tokens == 1
    box.exchange()
    box.check()
    if is_at_target:  # it has what had come, and computes the rest
        assert "r1" in box.workers[TARGET].answers
        assert box.migrations.num_migrated == 1


@pytest.mark.parametrize("first", [SOURCE, TARGET], ids=["source-first", "target-first"])
@pytest.mark.parametrize("num_heard", [0, 9], ids=["mute", "heard"])
@every_stage
def test_both_die(box: Box, stage: str, first: int, num_heard: int) -> None:
    """What one had said last may still be heard. The request starts anew where there is room."""
    bring_to(box, stage)
    for number in (first, SOURCE + TARGET - first):
        box.die(number, num_heard)
        box.check()
    assert box.dispatcher.kv_peers.transfers == {}
    assert core_phase(box)[1] in (None, OTHER)
    [request] = box.dispatcher.live.all()
    assert request.device in (None, OTHER)


@every_stage
@pytest.mark.parametrize("comes_back", [SOURCE, TARGET], ids=["source", "target"])
def test_one_that_dies_and_is_back_at_once(box: Box, stage: str, comes_back: int) -> None:
    """It is another process: what was for the one before is not for it."""
    bring_to(box, stage)
    box.die(comes_back, num_heard=0)
    box.come_up(comes_back)
    box.check()
    box.exchange()
    box.check()
    # The old life's KV transfers are nobody's: none was freed there, or the fake would have said
    # so.
    assert box.workers[comes_back].kv_transfers == set()


@has_kv_or_not
@every_stage
def test_the_client_leaves(box: Box, stage: str, has_kv: bool) -> None:
    bring_to(box, stage, has_kv=has_kv)
    box.cancel("r1")
    box.exchange()
    box.check_empty()
    assert box.records.ends == {"r1": FinishReason.ABORT}


@pytest.mark.parametrize("dies", [SOURCE, TARGET], ids=["source", "target"])
@every_stage
def test_the_client_leaves_and_one_dies(box: Box, stage: str, dies: int) -> None:
    bring_to(box, stage)
    box.cancel("r1")
    box.die(dies, num_heard=0)
    box.check()
    box.exchange()
    box.check_empty()


@pytest.mark.parametrize("dies", [SOURCE, TARGET], ids=["source", "target"])
@every_stage
def test_one_dies_and_the_client_leaves(box: Box, stage: str, dies: int) -> None:
    bring_to(box, stage)
    box.die(dies, num_heard=0)
    box.cancel("r1")
    box.check()
    box.exchange()
    box.check_empty()


def test_a_target_that_does_not_take_it(box: Box) -> None:
    bring_to(box, COMING)
    box.workers[TARGET].refuse("r1")
    box.exchange()
    box.check_empty()
    assert box.records.ends == {"r1": FinishReason.ERROR}
    failed = [one for one in box.sent if isinstance(one, m.RequestsFailed)]
    assert [one.request_ids for one in failed] == [["r1"]]


def test_a_source_that_has_it_no_more(box: Box) -> None:
    """It says so; the target computes it anew from its tokens."""
    del box.workers[SOURCE].answers["r1"]
    bring_to(box, ON_ITS_WAY)
    order = box.workers[TARGET].inbox[-1]
    assert isinstance(order, m.AddRequest)
    assert (order.kv_transfer, order.is_moving, order.output_token_ids) == (None, True, [0])


def test_what_nobody_has_asked_for_is_free_at_once(box: Box) -> None:
    """An answer that comes twice, and one of a request that has ended."""
    bring_to(box, ON_ITS_WAY)
    source = box.workers[SOURCE]
    for name, transfer_id in (("r1", "again"), ("nobody", "stray")):
        kv_transfer = m.KvTransfer(transfer_id, SOURCE, 1, [(0, 1)], 16)
        source.kv_transfers.add(transfer_id)
        source.outbox.append(m.Migrated(MODELS[0], name, kv_transfer=kv_transfer))
        box.hear(SOURCE)
        assert source.inbox[-1] == m.ReleaseKvTransfer(transfer_id)
    source.outbox.append(m.KvTransferUsed("unknown", SOURCE))
    box.hear(SOURCE)
    assert source.inbox[-1] == m.ReleaseKvTransfer("stray")


def test_an_adoption_of_nothing_is_ignored(box: Box) -> None:
    other = box.workers[OTHER]
    other.outbox.append(m.RequestAttached(MODELS[0], "nobody"))
    box.hear(OTHER)
    assert (box.migrations.num_migrated, core_phase(box)) == (0, ("MOVING", TARGET))


def test_an_adoption_before_the_release_is_ignored(box: Box) -> None:
    target = box.workers[TARGET]
    target.outbox.append(m.RequestAttached(MODELS[0], "r1"))
    box.hear(TARGET)
    assert (box.migrations.num_migrated, core_phase(box)) == (0, ("MOVING", TARGET))


class TestIntroductions:
    """A worker knows the host memory of those from which requests come to it, of no others."""

    @staticmethod
    def introduced(box: Box) -> list[list[int]]:
        """Whose host memory each worker has been told of, and has not read of yet."""
        return [
            [one.device for one in worker.inbox if isinstance(one, m.PeerHost)]
            for worker in box.workers
        ]

    @pytest.fixture
    def three(self) -> Box:
        return Box(3)

    def test_none_while_all_do_both(self, three: Box) -> None:
        assert self.introduced(three) == [[], [], []]

    def test_those_that_decode_know_those_that_prefill(self, three: Box) -> None:
        three.dispatcher.set_role(0, Role.PREFILL)
        assert self.introduced(three) == [[], [], []]
        three.dispatcher.set_role(2, Role.DECODE)
        assert self.introduced(three) == [[], [], [0]]
        three.dispatcher.set_role(1, Role.PREFILL)
        assert self.introduced(three) == [[], [], [0, 1]]

    def test_one_that_comes_back(self, three: Box) -> None:
        three.dispatcher.set_role(1, Role.PREFILL)
        three.dispatcher.set_role(2, Role.DECODE)
        three.exchange()
        three.die(1)
        assert three.workers[2].inbox[-1] == m.PeerDown(1)
        assert m.PeerDown(1) not in three.workers[0].inbox
        three.exchange()
        three.come_up(1)
        assert self.introduced(three) == [[], [], [1]]
        three.exchange()
        three.die(2)
        three.come_up(2)
        assert self.introduced(three) == [[], [], [1]]

    def test_before_the_first_request_moves(self, box: Box) -> None:
        """The fake workers refuse a KV transfer of one that they do not know."""
        bring_to(box, COMING)
        assert [one.peers for one in box.workers] == [set(), {SOURCE}, set()]

    def test_not_of_one_that_is_down(self, three: Box) -> None:
        three.die(1)
        three.dispatcher.set_role(1, Role.PREFILL)
        three.dispatcher.set_role(2, Role.DECODE)
        assert self.introduced(three) == [[], [], []]

    def test_not_of_one_without_host_memory(self, three: Box) -> None:
        """A simulated device, or one that does not share its memory."""
        three.workers[0].kv_host_fd = None
        three.dispatcher.set_role(0, Role.PREFILL)
        three.dispatcher.set_role(2, Role.DECODE)
        assert self.introduced(three) == [[], [], []]


class TestSharedPrefixes:
    @staticmethod
    def shared(box: Box) -> list[list[int]]:
        """Whose KV of ended requests each worker has been told to read, since it came up."""
        return [
            [one.device for one in worker.inbox if isinstance(one, m.PrefixPeer)]
            for worker in box.workers
        ]

    def test_all_read_all(self) -> None:
        assert self.shared(Box(3)) == [[1, 2], [0, 2], [0, 1]]

    def test_one_that_comes_back_is_read_anew(self) -> None:
        box = Box(3)
        box.die(1)
        assert self.shared(box) == [[1, 2], [], [0, 1]]
        box.come_up(1)
        assert self.shared(box) == [[1, 2, 1], [0, 2], [0, 1, 1]]

    def test_the_memory_of_a_dead_worker_is_read(self) -> None:
        box = Box(3)
        box.die(1)
        box.die(2)
        box.come_up(2)
        assert self.shared(box)[2] == [0, 1]

    def test_a_group_of_another_size_has_other_kv(self) -> None:
        box = Box(2)
        box.die(1)
        box.workers[1].device = DeviceSettings(kind="emulated", gpus=2)
        box.come_up(1)
        assert self.shared(box) == [[1], []]


def test_kv_does_not_go_to_a_group_of_another_size() -> None:
    """The source may free the KV at once, and the target computes it anew."""
    made = Box(2)
    made.dispatcher.set_draining(TARGET, is_draining=True)
    made.ask(LENGTH)
    made.exchange()
    made.workers[SOURCE].step(MODELS[0])
    made.exchange()
    target = made.workers[TARGET]
    target.device = target.device.model_copy(update={"gpus_as_written": 2})
    made.dispatcher.set_draining(TARGET, is_draining=False)
    made.dispatcher.set_draining(SOURCE, is_draining=True)
    made.exchange()
    assert not made.workers[SOURCE].kv_transfers
    assert not target.coming
    assert list(target.answers) == ["r1"]
    assert target.answers["r1"].order.kv_transfer is None
    assert made.migrations.num_migrated == 1
    made.settle()
