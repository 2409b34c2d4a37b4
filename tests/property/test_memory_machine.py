"""Any order of loads, evictions, steps, paging and failures keeps every byte that matters.

Several models with their own engines share one emulated device and one host
cache; copies are made by threads meanwhile, some of them for models elsewhere, and blocks
that were copied so come back as another request's. After each rule the bytes of all live and
cached blocks on the device and of all resident weights are compared with a plain model,
and every account is checked. ``GPUPOOL_MEMORY_OPERATIONS`` is how many rules are run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupoold.memory.host import HostSlot
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.pages import OutOfPages, WeightsId
from gpupoold.memory.transfers import Transfer
from gpupoold.memory.weights import WeightMemory
from tests.unit.memory.ledger import MemoryLedger
from tests.unit.memory.rig import (
    LAYOUTS,
    PAGE,
    Rig,
    geometry_of,
    pattern,
    read,
    read_block,
    write_block,
)

STEPS = 50
OPERATIONS = int(os.environ.get("GPUPOOL_MEMORY_OPERATIONS", "5000"))
WHICH = st.integers(0, 1_000)  # an index into whatever there is at that moment


@dataclass
class Model:
    """A model on the device, and what its memory should hold."""

    kv: KvMemory
    ledger: MemoryLedger
    weights: WeightMemory
    snapshot: bytes
    requests: list[list[int]] = field(default_factory=list)
    content: dict[int, bytes] = field(default_factory=dict)
    had: set[bytes] = field(default_factory=set)
    """Of any block, at any time."""

    @property
    def runnable(self) -> list[list[int]]:
        """Requests all of whose KV is on the device."""
        return [request for request in self.requests if self.kv.is_on_device(request)]

    def forget_worthless(self) -> None:
        """Only live and findable blocks have bytes that must be kept."""
        worthy = {block for request in self.requests for block in request}
        worthy |= set(self.ledger.cached().values())
        self.content = {block: data for block, data in self.content.items() if block in worthy}

    def contents_now(self) -> object:
        return (
            [self.kv.index.extents(place) for place in Place],
            self.kv.resident_bytes,
            self.kv.host_bytes,
            self.weights.num_mapped_pages,
            list(self.ledger.refs),
            self.ledger.num_free,
            self.ledger.cached(),
        )


@dataclass
class Sent:
    """Blocks that were copied for others, and what should be in the slot."""

    slot: HostSlot
    transfer: Transfer
    rows: list[int]
    contents: list[bytes]
    told: list[bool]


def row_sizes(kv: KvMemory) -> list[int]:
    """Models that agree on these can have each other's blocks."""
    return [row.num_bytes for row in kv.geometry.rows]


class MemoryMachine(RuleBasedStateMachine):
    @initialize(
        layouts=st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=2, max_size=3),
        num_pages=st.integers(24, 56),
        host_pages=st.integers(0, 40),
    )
    def start(self, layouts: list[str], num_pages: int, host_pages: int) -> None:
        self.rig = Rig(num_pages, host_pages)
        self.num_written = 0
        self.models = []
        self.sent: list[Sent] = []
        for number, layout in enumerate(layouts):
            kv, ledger = self.rig.kv(geometry_of(layout))
            weights, snapshot = self.rig.weights(5 + 6 * number, ("snapshot", number))
            self.models.append(Model(kv, ledger, weights, snapshot))
            for extent in range(2 * number, 2 * number + 3):
                self.back(number, extent, fail_in=0)
            self.request(number, num_blocks=2, num_cached=1)
            self.request(number, num_blocks=3, num_cached=1)

    @rule(which=WHICH, fail_in=st.integers(0, 3))
    def load(self, which: int, fail_in: int) -> None:
        model = self.model(which)
        missing_bytes = model.weights.missing_bytes
        moved = self.attempt(model, fail_in, missing_bytes // PAGE, model.weights.load)
        assert moved in (None, missing_bytes)
        assert model.weights.is_resident == (moved is not None)

    @rule(which=WHICH, num_pages=st.integers(1, 20))
    def begin_load(self, which: int, num_pages: int) -> None:
        weights = self.model(which).weights
        wanted = min(num_pages, weights.missing_bytes // PAGE)
        mapped, free = weights.num_mapped_pages, self.rig.pool.num_free
        try:
            weights.begin_load(self.rig.ins, num_pages)
        except OutOfPages:
            assert wanted > free
        else:
            assert weights.num_mapped_pages == mapped + wanted

    @rule(which=WHICH)
    def wait(self, which: int) -> None:
        weights = self.model(which).weights
        weights.wait()
        assert weights.loaded_bytes == weights.mapped_bytes

    @rule(which=WHICH, share=st.floats(0, 1))
    def wait_for(self, which: int, share: float) -> None:
        """A step that began early passes a gate."""
        model = self.model(which)
        weights = model.weights
        num_bytes = int(share * weights.mapped_bytes)
        weights.wait_for(num_bytes)
        assert num_bytes <= weights.present_bytes <= weights.mapped_bytes
        assert weights.arriving_bytes == weights.mapped_bytes - weights.present_bytes or (
            not weights.arriving_bytes  # copies have ended in between
        )
        assert read(weights.address, num_bytes) == model.snapshot[:num_bytes]

    @rule(which=WHICH)
    def stop(self, which: int) -> None:
        weights = self.model(which).weights
        weights.stop()
        assert weights.loaded_bytes == weights.mapped_bytes
        assert not weights.num_arriving

    @rule(which=WHICH, num_pages=st.none() | st.integers(0, 20))
    def evict(self, which: int, num_pages: int | None) -> None:
        weights = self.model(which).weights
        mapped = weights.num_mapped_pages
        weights.evict(num_pages)
        left = 0 if num_pages is None else max(0, mapped - num_pages)
        assert weights.num_mapped_pages <= left

    @rule(which=WHICH)
    def unbind(self, which: int) -> None:
        """The model loses its addresses; its weights stay while nobody needs the memory."""
        weights = self.model(which).weights
        weights.stop()
        loaded, owner = weights.num_mapped_pages, self.weights_id(which)
        free, stayed = self.rig.pool.num_free, self.rig.pool.num_unbound().get(owner, 0)
        weights.unbind(owner)
        assert (weights.num_mapped_pages, self.rig.pool.num_free) == (0, free + loaded)
        assert self.rig.pool.num_unbound().get(owner, 0) == (loaded or stayed)

    @rule(which=WHICH, num_pages=st.integers(1, 20), fail_in=st.integers(0, 2))
    def bind(self, which: int, num_pages: int, fail_in: int) -> None:
        """What has stayed is mapped at the first addresses, and is not copied."""
        weights, owner = self.model(which).weights, self.weights_id(which)
        weights.wait()
        free, before = self.rig.pool.num_free, weights.num_mapped_pages
        stayed = self.rig.pool.num_unbound().get(owner, 0)
        self.rig.device.fail_in = fail_in
        try:
            more = weights.bind(owner, num_pages)
        except OSError:
            assert fail_in == 1
            more = False
        finally:
            self.rig.device.fail_in = 0
        num_bound = weights.num_mapped_pages - before
        assert num_bound in (0, min(stayed, num_pages))
        assert self.rig.pool.num_free == free - num_bound
        assert more == (num_bound == num_pages)
        assert weights.loaded_bytes == weights.mapped_bytes

    @rule(which=WHICH, extent=WHICH, fail_in=st.integers(0, 4))
    def back(self, which: int, extent: int, fail_in: int) -> None:
        model = self.model(which)
        unmapped = model.kv.index.extents(Place.UNMAPPED)
        if unmapped:
            picked = unmapped[extent % len(unmapped)]
            self.appear(model, picked, fail_in, lambda: model.kv.map([picked]))

    @rule(which=WHICH, extent=WHICH)
    def unmap(self, which: int, extent: int) -> None:
        model = self.model(which)
        free = model.kv.index.idle()
        if free:
            self.vanish(model, free[extent % len(free)], model.kv.unmap)

    @rule(which=WHICH, extent=WHICH)
    def page_out(self, which: int, extent: int) -> None:
        """The model is paused for a moment; some of it goes, or begins to go."""
        model = self.model(which)
        device = model.kv.index.extents(Place.DEVICE)
        if not device:
            return
        picked = device[extent % len(device)]
        model.kv.finish_exports()
        num_live = len(model.kv.live_blocks(picked))
        before = model.contents_now()
        if not model.kv.begin_page_out([picked], self.rig.outs):
            assert num_live > self.rig.host.num_free_blocks(model.kv.geometry.block_bytes)
            assert model.contents_now() == before
            return
        assert picked in model.kv.index.extents(Place.LEAVING if num_live else Place.UNMAPPED)

    @rule(which=WHICH, extent=WHICH, fail_in=st.integers(0, 4))
    def page_in(self, which: int, extent: int, fail_in: int) -> None:
        model = self.model(which)
        host = model.kv.index.extents(Place.HOST)
        if not host:
            return
        picked, free = host[extent % len(host)], self.rig.pool.num_free
        [group] = [group for group in model.kv.groups_on_host([]) if picked in group]
        wanted = model.kv.num_missing_pages(group)
        self.attempt(model, fail_in, wanted, lambda: model.kv.begin_page_in([picked], self.rig.ins))
        if picked in model.kv.index.extents(Place.ARRIVING):
            assert self.rig.pool.num_free == free - wanted

    @rule(which=WHICH)
    def settle(self, which: int) -> None:
        self.model(which).kv.settle()

    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        """All copies under way end; what has come shows nothing of others."""
        model = self.model(which)
        leaving, arriving = (
            model.kv.index.extents(Place.LEAVING),
            model.kv.index.extents(Place.ARRIVING),
        )
        free, wanted = self.rig.pool.num_free, model.kv.num_leaving_pages
        self.rig.finish(model.kv)
        assert self.rig.pool.num_free == free + wanted
        gone = model.kv.index.extents(Place.HOST) + model.kv.index.extents(Place.UNMAPPED)
        assert set(leaving) <= set(gone)
        assert set(arriving) <= set(model.kv.index.extents(Place.DEVICE))
        for extent in arriving:
            for block in model.kv.geometry.blocks(extent):
                if block not in model.content:
                    self.shows_nothing_foreign(model, block)

    @rule(which=WHICH)
    def want_again(self, which: int) -> None:
        model = self.model(which)
        leaving = model.kv.index.extents(Place.LEAVING)
        model.kv.stop(Place.LEAVING)
        assert set(leaving) <= set(model.kv.index.extents(Place.DEVICE))

    @rule(which=WHICH)
    def change_plans(self, which: int) -> None:
        model = self.model(which)
        model.kv.stop(Place.ARRIVING)
        assert not model.kv.index.extents(Place.ARRIVING)

    @rule(which=WHICH, step=st.integers(1, 3))
    def pause(self, which: int, step: int) -> None:
        """Much of a model goes out together, as far as the host has room."""
        kv = self.model(which).kv
        extents = kv.index.extents(Place.DEVICE)[::step]
        num_done = kv.begin_page_out(extents, self.rig.outs)
        assert set(extents[num_done:]) <= set(kv.index.extents(Place.DEVICE))
        assert not set(extents[:num_done]) & set(kv.index.extents(Place.DEVICE))

    @rule(which=WHICH, fail_in=st.integers(0, 6))
    def resume(self, which: int, fail_in: int) -> None:
        """All of a model comes back, as far as there are pages."""
        for extent in self.model(which).kv.index.extents(Place.HOST):
            if extent in self.model(which).kv.index.extents(
                Place.HOST
            ):  # it did not come with another
                self.page_in(which, extent=0, fail_in=fail_in)

    @rule(which=WHICH, request=WHICH)
    def decode(self, which: int, request: int) -> None:
        """A request whose KV is here writes to its last block, whatever else is being copied."""
        model = self.model(which)
        runnable = [blocks for blocks in model.runnable if blocks]
        if runnable:
            block = runnable[request % len(runnable)][-1]
            if model.ledger.refs[block] == 1 and block not in model.ledger.cached().values():
                self.fill(model, block)

    @rule(which=WHICH, num_blocks=st.integers(1, 6), num_cached=st.integers(0, 3))
    def request(self, which: int, num_blocks: int, num_cached: int) -> None:
        model = self.model(which)
        blocks = model.ledger.allocate(min(num_blocks, model.ledger.num_free))
        assert model.kv.is_on_device(blocks)
        model.requests.append(blocks)
        for block in blocks:
            self.fill(model, block)
        for block in blocks[:num_cached]:
            model.ledger.remember(block, f"prefix {self.num_written} of {block}")

    @rule(which=WHICH, key=WHICH)
    def request_with_a_known_prefix(self, which: int, key: int) -> None:
        model = self.model(which)
        keys = [
            key for key, b in sorted(model.ledger.cached().items()) if model.kv.is_on_device([b])
        ]
        if not keys:
            return
        block = model.ledger.reuse(keys[key % len(keys)])
        assert block in model.content
        model.requests.append([block])

    @rule(which=WHICH, request=WHICH)
    def end(self, which: int, request: int) -> None:
        model = self.model(which)
        if model.requests:
            model.ledger.release(model.requests.pop(request % len(model.requests)))
            model.kv.discard_dead()

    @rule(which=WHICH)
    def preempt_all(self, which: int) -> None:
        model = self.model(which)
        model.kv.stop(Place.LEAVING)
        model.kv.stop(Place.ARRIVING)
        model.kv.finish_exports()
        for blocks in model.requests:
            model.ledger.release(blocks)
        model.requests.clear()
        model.kv.discard_dead()
        model.kv.unmap(model.kv.index.idle())
        assert model.kv.resident_bytes == 0
        assert model.kv.host_bytes == 0

    @rule(which=WHICH, request=WHICH, step=st.sampled_from([1, -1]), is_end=st.booleans())
    def export(self, which: int, request: int, step: int, is_end: bool) -> None:
        """A request's blocks are copied for another device, where it may go on from now on."""
        model = self.model(which)
        if not model.requests:
            return
        blocks = model.requests[request % len(model.requests)][::step]
        contents, told = [model.content[block] for block in blocks], list[bool]()
        begun = model.kv.export(blocks, self.rig.outs, told.append)
        if begun is None:
            assert len(blocks) > self.rig.host.num_free_blocks(model.kv.geometry.block_bytes)
            return
        self.sent.append(Sent(*begun, row_sizes(model.kv), contents, told))
        if is_end:
            self.end(which, request)

    @rule(which=WHICH, sent=WHICH)
    def attach_slot(self, which: int, sent: int) -> None:
        """A request comes with blocks that were copied from where it was."""
        model = self.model(which)
        fitting = [one for one in self.sent if one.rows == row_sizes(model.kv)]
        if not fitting:
            return
        picked = fitting[sent % len(fitting)]
        picked.transfer.wait()
        assert picked.told == [True]
        blocks = model.kv.attach_slot(picked.slot, len(picked.contents))
        if blocks is None:
            # The null block's extent must stay on the device while the model runs: never adopted.
            unmapped = [extent for extent in model.kv.index.extents(Place.UNMAPPED) if extent]
            num_held = sum(len(model.kv.geometry.blocks(extent)) for extent in unmapped)
            assert len(picked.contents) > num_held
            return
        self.sent.remove(picked)
        model.requests.append(blocks)
        model.content |= dict(zip(blocks, picked.contents, strict=True))
        model.had |= set(picked.contents)

    @rule(sent=WHICH)
    def forget(self, sent: int) -> None:
        """Nobody wants what was copied."""
        if self.sent:
            picked = self.sent.pop(sent % len(self.sent))
            picked.transfer.wait()
            picked.slot.free()

    @invariant()
    def bytes_are_right(self) -> None:
        for model in self.models:
            model.forget_worthless()
            there = model.kv.index.extents(Place.DEVICE) + model.kv.index.extents(Place.LEAVING)
            for extent in there:
                for block in model.kv.geometry.blocks(extent):
                    if block in model.content:
                        assert read_block(model.kv, block) == model.content[block]
            loaded = model.weights.loaded_bytes
            assert read(model.weights.address, loaded) == model.snapshot[:loaded]

    @invariant()
    def accounts_are_right(self) -> None:
        self.rig.pool.check_integrity()
        self.rig.host.slabs.check_integrity()
        owned: list[int] = []
        for model in self.models:
            model.kv.check_integrity()
            assert len(model.kv.address_range.physical_pages) == model.kv.resident_bytes // PAGE
            assert len(model.weights.address_range.physical_pages) == model.weights.num_mapped_pages
            owned += (
                model.kv.address_range.physical_pages + model.weights.address_range.physical_pages
            )
            device = model.kv.index.extents(Place.DEVICE)
            usable = {block for extent in device for block in model.kv.geometry.blocks(extent)}
            free = {b for b, count in enumerate(model.ledger.refs) if not count}
            assert free <= usable, "the engine could be given a block that is not here"
        self.rig.pool.check_owned(owned)
        own_bytes = sum(model.kv.host_bytes for model in self.models)
        sent_bytes = sum(one.slot.num_bytes for one in self.sent)
        assert self.rig.host.used_bytes == own_bytes + sent_bytes

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            while self.sent:
                self.forget(0)
            self.rig.close()

    def fill(self, model: Model, block: int) -> None:
        self.num_written += 1
        data = pattern(self.num_written, model.kv.geometry.block_bytes)
        write_block(model.kv, block, data)
        model.content[block] = data
        model.had.add(data)

    def weights_id(self, which: int) -> WeightsId:
        return WeightsId(str(which % len(self.models)), (0, 0))

    def model(self, which: int) -> Model:
        return self.models[which % len(self.models)]

    def attempt(
        self, model: Model, fail_in: int, num_pages: int, act: Callable[[], int | None]
    ) -> int | None:
        """Do it, or see that a failure had its reason and changed nothing."""
        before, free = model.contents_now(), self.rig.pool.num_free
        self.rig.device.fail_in = fail_in
        try:
            return act()
        except OutOfPages:
            assert num_pages > free
        except OSError:
            assert fail_in
        finally:
            self.rig.device.fail_in = 0
        assert model.contents_now() == before
        assert self.rig.pool.num_free == free
        return None

    def appear(
        self, model: Model, extent: int, fail_in: int, act: Callable[[], int | None]
    ) -> None:
        """An extent comes to the device: as many pages as predicted, nothing of others on them."""
        kv, free = model.kv, self.rig.pool.num_free
        wanted = kv.num_missing_pages([extent])
        self.attempt(model, fail_in, wanted, act)
        if extent not in kv.index.extents(Place.DEVICE):
            return
        assert self.rig.pool.num_free == free - wanted
        for block in kv.geometry.blocks(extent):
            if block not in model.content:
                self.shows_nothing_foreign(model, block)

    def shows_nothing_foreign(self, model: Model, block: int) -> None:
        """Bytes that nobody wrote since the model got the page are zero or its own, which others
        may have by adoption."""
        contents = [data for other in self.models for data in other.content.values()]
        snapshots = [other.snapshot for other in self.models]
        others = b"".join([*(data for data in contents if data not in model.had), *snapshots])
        data = read_block(model.kv, block)
        for start in range(0, len(data) - 32, 32):
            piece = data[start : start + 32]
            assert not any(piece) or piece not in others

    def vanish(self, model: Model, extent: int, act: Callable[[list[int]], object]) -> None:
        """An extent leaves the device: as many pages come free as predicted."""
        free, wanted = self.rig.pool.num_free, model.kv.num_resident_pages([extent])
        act([extent])
        assert self.rig.pool.num_free == free + wanted


MemoryMachine.TestCase.settings = settings(
    max_examples=OPERATIONS // STEPS, stateful_step_count=STEPS
)
TestMemoryMachine = MemoryMachine.TestCase


def test_bytes_that_another_adopted_are_still_ones_own() -> None:
    """A request ends while its blocks come back: they hold what somewhere else goes on with."""
    machine = MemoryMachine()
    machine.start(layouts=["blocks-outermost"] * 2, num_pages=24, host_pages=9)
    machine.export(which=1, request=0, step=1, is_end=False)
    machine.attach_slot(which=0, sent=0)
    machine.page_out(which=1, extent=0)
    machine.finish(which=1)
    machine.resume(which=1, fail_in=0)
    machine.end(which=1, request=0)
    machine.bytes_are_right()
    machine.finish(which=1)
    machine.accounts_are_right()
    machine.teardown()


def test_adoption_leaves_the_null_blocks_extent_alone() -> None:
    """Once every other extent is away, seven free blocks beside the null block are not enough."""
    machine = MemoryMachine()
    machine.start(layouts=["blocks-outermost", "small-blocks"], num_pages=24, host_pages=2)
    kv = machine.models[1].kv
    for rule_name in ("export", "export", *["attach_slot"] * 2, *["export", "attach_slot"] * 2):
        if rule_name == "export":
            machine.export(which=1, request=0, step=1, is_end=False)
        else:
            machine.attach_slot(which=1, sent=0)
        machine.bytes_are_right()
        machine.accounts_are_right()
    assert kv.geometry.blocks(0) == range(8)
    assert kv.index.extents(Place.UNMAPPED) == [0]
    assert len(machine.sent) == 1  # the last one was refused
    machine.teardown()
