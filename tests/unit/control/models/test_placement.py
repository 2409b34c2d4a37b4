"""Engines on two played workers: side by side, moved by hand, and with too little memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import AddModelRequest, Progress, SetModelRequest
from gpupoold.control.fleet.states import ModelPhase
from gpupoold.control.frontends import Frontend
from gpupoold.control.weights import cache
from gpupoold.domain import Priority
from gpupoold.errors import Failed, Refused, Unavailable, UsageError
from tests.unit.checkpoints.samples import checkpoint, write
from tests.unit.control.models.models_box import TIMEOUT_S, ModelsBox, ServedModels, running


@pytest_asyncio.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S)
    async with running(box, "a", "b"):
        await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))
        box.told.clear()
        yield box


async def test_a_snapshot_is_far_from_the_devices_of_another_node(
    tmp_path: Path, registry: Registry, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"a": 0, "b": 1, "gpupool-snapshot": 1}  # the last is read from its file

    def nodes_of(fd: int, num_bytes: int, num_parts: int) -> tuple[int, ...]:
        name = os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").split()[0]
        return (nodes[name],) * num_parts

    monkeypatch.setattr(cache, "nodes_of", nodes_of)
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S)
    box.far_share = 0.5
    async with running(box, "a", "b"):
        await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))

        def far() -> list[frozenset[str]]:
            box.snapshots.check_nodes(0.0)
            return [box.dispatcher.state.devices[number].far for number in range(2)]

        assert far() == [{"b"}, {"a"}]
        info = await box.cache_control.info()
        assert [one.snapshots[0].nodes for one in info.models] == [[0], [1]]
        await box.cache_control.drop("a")
        assert far() == [{"b"}, set()]
        await box.cache_control.warm("a")
        assert far() == [{"a", "b"}, set()]


class TestSideBySide:
    async def test_models_that_are_added_at_once(self, box: ModelsBox) -> None:
        box.hold(0, 1)
        adding = [asyncio.create_task(added(box, name)) for name in ("x", "y")]
        await box.until(lambda: {number for _, number in box.waiting} == {0, 1})
        assert {name for name, _ in box.waiting} == {"x", "y"}
        box.release()
        await asyncio.gather(*adding)
        assert box.hosts_of("x") == box.hosts_of("y") == [0, 1]
        assert sorted(one.split()[0] for one in box.told) == ["attach", "attach", "build", "build"]

    async def test_a_model_serves_from_its_first_device_on(self, box: ModelsBox) -> None:
        box.hold(1)
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: ("new", 1) in box.waiting)
        assert box.fleet.availability("new").can_serve
        assert box.frontends.states()["new"] == "ready"
        assert not adding.done()
        box.release()
        assert [one.stage for one in await adding][-2:] == ["spread", "ready"]
        assert box.hosts_of("new") == [0, 1]

    async def test_an_api_is_mounted_once_for_all_devices(self, box: ModelsBox) -> None:
        box.frontends.may_mount.clear()
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: bool(box.hosts_of("new")))
        box.lifecycle.controller.check(asyncio.get_running_loop().time())
        await box.until(lambda: box.hosts_of("new") == [0, 1])
        box.frontends.may_mount.set()
        await adding
        assert box.frontends.num_mounts["new"] == 1
        assert box.frontends.states()["new"] == "ready"

    async def test_a_frontend_that_comes_up_before_the_mount_is_not_the_only_one(
        self, box: ModelsBox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_decide, woken, host = asyncio.Event(), box.fleet.woken, box.dispatcher.host
        may_decide.set()

        async def woken_if_allowed() -> set[str]:
            found = await woken()
            await may_decide.wait()
            return found

        def host_undecided(*arguments: Any) -> None:
            may_decide.clear()
            host(*arguments)

        monkeypatch.setattr(box.fleet, "woken", woken_if_allowed)
        monkeypatch.setattr(box.dispatcher, "host", host_undecided)
        box.fleet.wake()
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: not may_decide.is_set())
        frontend = ServedModels()
        await box.lifecycle.frontend_up(cast(Frontend, frontend))
        assert frontend.mounted == {"a", "b", "new"}
        monkeypatch.setattr(box.dispatcher, "host", host)
        may_decide.set()
        await adding
        assert "new" in box.frontends.mounted

    async def test_an_alias_is_mounted_after_the_api_without_the_alias(
        self, box: ModelsBox
    ) -> None:
        box.frontends.may_mount.clear()
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: bool(box.frontends.num_mounts["new"]))
        request = SetModelRequest(add_aliases=["alias"])
        changing = asyncio.create_task(box.lifecycle.set("new", request))
        await box.until(lambda: box.fleet.is_held("new"))
        box.frontends.may_mount.set()
        await asyncio.gather(adding, changing)
        assert box.frontends.aliases["new"] == ("alias",)

    async def test_it_stays_when_the_reader_leaves_then(self, box: ModelsBox) -> None:
        async for line in box.lifecycle.add(request(box, "new")):
            if line.stage == "spread":
                break
        assert box.fleet.availability("new").can_serve
        await settle(box)
        assert box.hosts_of("new") == [0, 1]

    async def test_a_worker_loads_one_model_at_a_time(self, box: ModelsBox) -> None:
        await box.lifecycle.place("a", [0])
        box.dispatcher.set_draining(1, is_draining=True)
        box.hold(0)
        adding = [asyncio.create_task(added(box, name)) for name in ("x", "y")]
        await box.until(lambda: bool(box.waiting) and box.fleet.knows("x") and box.fleet.knows("y"))
        await asyncio.sleep(0.1)
        assert len(box.waiting) == 1
        box.release()
        await asyncio.gather(*adding)

    async def test_a_removal_by_force_undoes_the_addition(self, box: ModelsBox) -> None:
        box.hold(0, 1)
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: bool(box.waiting))
        removal = asyncio.create_task(box.lifecycle.remove("new", "force"))
        box.release()
        await removal
        with pytest.raises(Refused, match="new was removed while being added"):
            await adding
        assert not box.fleet.knows("new")

    async def test_a_removal_waits_for_the_addition(self, box: ModelsBox) -> None:
        box.hold(0, 1)
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: bool(box.waiting))
        removal = asyncio.create_task(box.lifecycle.remove("new", "drain"))
        box.release()
        await asyncio.gather(adding, removal)
        assert not box.fleet.knows("new")

    async def test_a_new_worker_does_not_wait_for_a_load_elsewhere(self, box: ModelsBox) -> None:
        box.hold(0)
        adding = asyncio.create_task(added(box, "new"))
        await box.until(lambda: bool(box.waiting))
        box.processes[1].end(-signal.SIGKILL)
        await box.until(lambda: {"attach a on 1", "attach b on 1"} <= set(box.told))
        assert not adding.done()
        box.release()
        await adding


class TestTroubleElsewhere:
    async def test_a_further_device_that_fails_is_tried_again(self, box: ModelsBox) -> None:
        box.errors["new on 1"] = Failed("no such layer")
        assert (await added(box, "new"))[-1].stage == "ready"
        assert box.hosts_of("new") == [0]
        assert "model_failed" in await box.events()
        box.errors.clear()
        await settle(box)
        assert box.hosts_of("new") == [0]  # too early
        waits = box.lifecycle.controller._lanes["new"].waits
        assert waits.keys() == {"load 1"}
        waits["load 1"] = (10.0, asyncio.get_running_loop().time())
        await settle(box)
        assert box.hosts_of("new") == [0, 1]

    async def test_a_draining_device_gets_it_afterwards(self, box: ModelsBox) -> None:
        box.dispatcher.set_draining(0, is_draining=True)
        await added(box, "new")
        assert box.hosts_of("new") == [1]
        box.dispatcher.set_draining(0, is_draining=False)
        await settle(box)
        assert box.hosts_of("new") == [0, 1]

    async def test_a_drain_of_the_only_device_moves_the_model(self, box: ModelsBox) -> None:
        await box.lifecycle.place("a", [0])
        await box.registry.set_devices("a", [])
        box.fleet.changed((await box.lifecycle.find("a")).spec)
        box.dispatcher.set_draining(0, is_draining=True)
        await settle(box)
        assert box.hosts_of("a") == [0, 1]

    async def test_a_dead_device_fails_no_addition(self, box: ModelsBox) -> None:
        box.broken.add(0)
        box.processes[0].end(-signal.SIGKILL)
        await box.until(lambda: box.supervisor.workers[0].state == "down")
        await added(box, "new")
        assert box.hosts_of("new") == [1]


class TestByHand:
    async def test_it_moves_and_its_requests_continue(self, box: ModelsBox) -> None:
        box.ask("a", "r1")
        [number] = [one for one, ids in box.requests.items() if "r1" in ids] or await sent(box)
        other = 1 - number
        row = await box.lifecycle.place("a", [other])
        assert row.spec.devices == (other,)
        assert box.hosts_of("a") == [other]
        assert f"abort r1 on {number}" in box.told
        await box.until(lambda: "r1" in box.requests.get(other, []))
        assert "model_placed" in await box.events()

    async def test_the_choice_is_given_back(self, box: ModelsBox) -> None:
        await box.lifecycle.place("a", [1])
        row = await box.lifecycle.place("a", [])
        assert row.spec.devices == ()
        await box.until(lambda: box.hosts_of("a") == [0, 1])

    async def test_an_addition_with_devices(self, box: ModelsBox) -> None:
        await added(box, "new", devices=[1])
        assert box.hosts_of("new") == [1]
        await settle(box)
        assert box.hosts_of("new") == [1]

    async def test_devices_that_do_not_exist(self, box: ModelsBox) -> None:
        with pytest.raises(UsageError, match="there is no device 2"):
            await box.lifecycle.place("a", [2])
        with pytest.raises(UsageError, match="there is no device 7"):
            await added(box, "new", devices=[0, 7])
        assert box.fleet.availability("new").phase is ModelPhase.REMOVED

    async def test_it_lasts_beyond_a_worker(self, box: ModelsBox) -> None:
        await box.lifecycle.place("a", [1])
        box.told.clear()
        box.processes[0].end(-signal.SIGKILL)
        await box.until(lambda: box.told == ["attach b on 0"])
        await box.until(lambda: box.supervisor.workers[0].has_loaded)
        assert box.hosts_of("a") == [1]


class TestScarcity:
    @pytest_asyncio.fixture
    async def full(
        self, tmp_path: Path, registry: Registry, history: History
    ) -> AsyncIterator[ModelsBox]:
        """Two devices, each with place for two engines, which have them."""
        memory = {"engines": 25}
        box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S, memory=memory)
        box.engine_bytes, box.family = 10, "another family"
        async with running(box, "a", "b"):
            await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))
            yield box

    async def test_engines_without_a_family_are_no_place_for_another(self, full: ModelsBox) -> None:
        """Engines of models with adapters or drafters, say, of equal layout."""
        full.family = ""
        await added(full, "c")
        room, [number] = full.lifecycle.room, full.hosts_of("c")
        engines = room.device(full.supervisor.workers[number]).engines
        assert len(engines) == 2
        assert all(bool(engine.layout) == (name != "c") for name, engine in engines.items())

    async def test_a_second_engine_makes_place(self, full: ModelsBox) -> None:
        await added(full, "c")
        assert len(full.hosts_of("c")) == 1
        assert sorted(len(full.hosts_of(name)) for name in "ab") == [1, 2]
        assert "engine_evicted" in await full.events()
        assert set(full.frontends.states().values()) == {"ready"}

    async def test_an_evicted_model_is_loaded_for_a_request(self, full: ModelsBox) -> None:
        for name in "cdef":
            await added(full, name)
        [evicted, *_] = [name for name in "abcdef" if not full.hosts_of(name)]
        now = full.fleet.availability(evicted)
        assert now.can_serve
        assert not full.fleet.is_warm(evicted)
        full.ask(evicted, "r1")
        await full.until(lambda: bool(full.hosts_of(evicted)))
        await full.until(lambda: any("r1" in ids for ids in full.requests.values()))
        assert full.frontends.states()[evicted] == "ready"

    async def test_an_engine_is_given_to_a_model_of_the_same_layout(self, full: ModelsBox) -> None:
        """A new fine-tune, and one whose snapshot is in host memory."""
        for name in "cdef":
            await added(full, name)
        taken = [one.split()[3] for one in full.told if one.startswith("bind")]
        assert taken == [*"def"]  # a and b are no fine-tunes
        full.told.clear()
        [evicted, *_] = [name for name in "abcdef" if not full.hosts_of(name)]
        full.ask(evicted, "r1")
        await full.until(lambda: bool(full.hosts_of(evicted)))
        [number] = full.hosts_of(evicted)
        [bound] = [one for one in full.told if one.startswith("bind")]
        former = bound.split()[2].removesuffix(":")
        assert bound == f"bind to {former}: {evicted} on {number}"
        assert not full.hosts_of(former)
        assert full.fleet.hosts.kept_bytes(number) == 0
        events = await full.history.events_after(0, 1000)
        texts = [one.message for one in events if one.subject == former]
        assert f"the engine on device {number} was given to {evicted}" in texts

    async def test_an_engine_is_given_away_although_the_limit_is_lower_now(
        self, full: ModelsBox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine takes no more memory than before; the others stay."""
        for name in "cdef":
            await added(full, name)
        hosted = {name: full.hosts_of(name) for name in "abcdef"}
        [evicted, *_] = [name for name, numbers in hosted.items() if not numbers]
        monkeypatch.setattr(full.lifecycle.room, "limit_bytes", lambda worker: 1)
        full.ask(evicted, "r1")
        await full.until(lambda: any("r1" in ids for ids in full.requests.values()))
        changed = [name for name in "abcdef" if full.hosts_of(name) != hosted[name]]
        assert len(changed) == 2, "the engine has another model"

    async def test_a_claim_to_an_engine_that_is_used_again_is_refused(
        self, full: ModelsBox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room = full.lifecycle.room
        monkeypatch.setattr(room, "may_leave", lambda name, number: False)
        with pytest.raises(Refused, match="too little memory for another engine"):
            await added(full, "c")
        assert not room.claims
        assert all(full.hosts_of(name) == [0, 1] for name in "ab")
        assert "engine_evicted" not in await full.events()

    async def test_another_engine_leaves_for_an_engine_that_is_used_again(
        self, full: ModelsBox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room, asked = full.lifecycle.room, list[str]()
        may_leave = room.may_leave

        def may_another_leave(name: str, number: int) -> bool:
            claim = room.claims.get(number)
            if claim is not None and claim.holder == name:
                asked.append(name)
            return name not in asked[:1] and may_leave(name, number)

        monkeypatch.setattr(room, "may_leave", may_another_leave)
        await added(full, "c")
        assert full.hosts_of(asked[0]) == [0, 1]
        assert sorted(len(full.hosts_of(name)) for name in "ab") == [1, 2]

    async def test_an_engine_leaves_once_for_a_change_that_fails(self, full: ModelsBox) -> None:
        controller, loop = full.lifecycle.controller, asyncio.get_running_loop()
        lane = controller._lanes["a"]
        full.errors["a on 0"] = Failed("no memory")
        full.fleet.hosts.of("a", 0).options = None
        full.fleet.wake("a")
        await full.until(lambda: "replace 0" in lane.waits and not lane.steps)
        controller.check(loop.time())
        await full.until(lambda: full.hosts_of("b") == [0, 1])
        lane.waits["replace 0"] = (10.0, loop.time())
        full.fleet.wake("a")
        await full.until(lambda: lane.waits["replace 0"][0] > 10.0 and not lane.steps)
        assert full.hosts_of("b") == [0, 1]
        assert (await full.events()).count("engine_evicted") == 1

    async def test_engines_in_use_stay_and_the_addition_is_refused(self, full: ModelsBox) -> None:
        await full.lifecycle.place("a", [0, 1])
        await full.lifecycle.place("b", [0, 1])
        with pytest.raises(Refused) as raised:
            await added(full, "c")
        text = str(raised.value)
        assert "about 10 B are needed on device 0, where 20 B of 25 B are used" in text
        assert "a 10 B chosen by hand, b 10 B chosen by hand" in text
        assert not full.fleet.knows("c")
        assert all(full.hosts_of(name) == [0, 1] for name in "ab")

    async def test_an_engine_larger_than_expected(self, full: ModelsBox) -> None:
        full.engine_bytes = 26
        with pytest.raises(Refused, match="about 26 B are needed"):
            await added(full, "c")
        assert not full.fleet.knows("c")

    async def test_a_request_waits_for_engines_in_use(self, full: ModelsBox) -> None:
        for name in "cdef":
            await added(full, name)
        hosted = [name for name in "abcdef" if full.hosts_of(name)]
        [evicted, *_] = [name for name in "abcdef" if not full.hosts_of(name)]
        for name in hosted:
            full.ask(name, f"of {name}")
        full.ask(evicted, "r1")
        await asyncio.sleep(0.2)
        assert not full.hosts_of(evicted)
        full.dispatcher.cancel(f"of {hosted[0]}", "enough")
        await full.until(lambda: bool(full.hosts_of(evicted)))
        assert not full.hosts_of(hosted[0])

    async def test_fine_tunes_with_requests_take_turns(
        self, full: ModelsBox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The requests of the model that had the engine wait, and go on with the next engine."""
        monkeypatch.setattr("gpupoold.scheduling.hosting.SHARED_S", 0.1)
        monkeypatch.setattr("gpupoold.scheduling.hosting.STARVING_S", 0.1)
        hosted, evicted = await all_in_use(full)
        full.told.clear()
        full.ask(evicted, "r1")
        await ticking(full, lambda: bool(full.hosts_of(evicted)))
        bound, *_ = [one for one in full.told if one.startswith("bind")]
        former = bound.split()[2].removesuffix(":")
        number = full.hosts_of(evicted)[0]
        assert former in "cdef"
        assert f"abort of {former} on {number}" in full.told
        assert bound == f"bind to {former}: {evicted} on {number}"
        assert full.fleet.availability(former).can_serve
        room, worker = full.lifecycle.room, full.supervisor.workers[number]
        await asyncio.sleep(0.15)
        assert room.device(worker).engines[evicted].served_s == 0, "its request has no token yet"
        monkeypatch.setattr("gpupoold.scheduling.hosting._MOST_SILENT_S", 0.1)
        assert room.device(worker).engines[evicted].served_s > 0.1
        full.requests.clear()
        await ticking(full, lambda: f"of {former}" in chain(*full.requests.values()))
        assert all(full.dispatcher.live.num_of(name) for name in (*hosted, evicted))

    async def test_background_requests_wait_for_an_idle_engine(
        self, full: ModelsBox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gpupoold.scheduling.hosting.SHARED_S", 0.0)
        monkeypatch.setattr("gpupoold.scheduling.hosting.STARVING_S", 0.0)
        hosted, evicted = await all_in_use(full)
        full.ask(evicted, "r1", Priority.BACKGROUND)
        for _ in range(5):
            full.lifecycle.controller.check(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
        assert not full.hosts_of(evicted)
        full.dispatcher.cancel(f"of {hosted[0]}", "enough")
        await ticking(full, lambda: bool(full.hosts_of(evicted)))

    async def test_all_are_served_again_after_a_death(self, full: ModelsBox) -> None:
        for name in "cd":
            await added(full, name)
        killed = full.processes[0]
        killed.end(-signal.SIGKILL)
        await full.until(lambda: full.processes[0] is not killed)
        await full.until(lambda: full.supervisor.workers[0].has_loaded)
        await settle(full)
        for name in "abcd":
            full.ask(name, f"of {name}")
        await full.until(lambda: not any(full.dispatcher.live.num_waiting(one) for one in "abcd"))


async def all_in_use(box: ModelsBox) -> tuple[list[str], str]:
    """Add fine-tunes and ask all models with an engine; return them, and a fine-tune without."""
    box.family = "family"
    for name in "cdef":
        await added(box, name)
    hosted = [name for name in "abcdef" if box.hosts_of(name)]
    for name in hosted:
        box.ask(name, f"of {name}")
    return hosted, next(name for name in "cdef" if not box.hosts_of(name))


async def ticking(box: ModelsBox, condition: Callable[[], bool]) -> None:
    """Wait as ``until``, while the daemon looks at all models from time to time."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            box.lifecycle.controller.check(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)


async def settle(box: ModelsBox) -> None:
    """Let the controller look at the box, and wait for its loads."""
    controller = box.lifecycle.controller
    for _ in range(2):
        controller.check(asyncio.get_running_loop().time())
        await asyncio.gather(*(controller.settle(name) for name in box.fleet.names()))


async def sent(box: ModelsBox) -> list[int]:
    await box.until(lambda: bool(box.requests))
    return list(box.requests)


def request(box: ModelsBox, name: str, devices: list[int] | None = None) -> AddModelRequest:
    folder = write(box.folder / name, checkpoint())
    return AddModelRequest(name=name, source=str(folder), devices=devices or [])


async def test_the_first_engine_is_no_estimate_for_later_loads(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    """Its memory has the libraries: the model would wait for as much although they are loaded."""
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S, devices=("cuda:0",))
    box.engine_bytes = 10
    await box.start()
    try:
        await box.until(lambda: box.supervisor.workers[0].is_ready)
        for name in "ab":
            await added(box, name)
        found = {row.spec.name: [*row.engine_bytes.values()] for row in await registry.list()}
        assert found == {"a": [], "b": [10]}
    finally:
        await box.stop()


class TestStarts:
    async def test_an_addition_waits_for_the_chosen_device_to_start(
        self, tmp_path: Path, registry: Registry, history: History
    ) -> None:
        box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S)
        start = box.starting[1] = asyncio.Event()
        await box.start()
        try:
            await box.until(lambda: box.supervisor.workers[0].is_ready)
            adding = asyncio.create_task(added(box, "new", [1]))
            await asyncio.sleep(0.3)
            assert not adding.done()
            start.set()
            assert [one.stage for one in await adding][-1] == "ready"
            assert box.hosts_of("new") == [1]
        finally:
            await box.stop()

    async def test_a_device_that_does_not_start_is_not_waited_for(
        self, tmp_path: Path, registry: Registry, history: History
    ) -> None:
        box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S)
        box.broken.add(1)
        await box.start()
        try:
            workers = box.supervisor.workers
            await box.until(lambda: workers[0].is_ready and workers[1].state == "down")
            with pytest.raises(Unavailable, match=r"can load new \(only 1 may\)"):
                await added(box, "new", [1])
        finally:
            await box.stop()


async def added(box: ModelsBox, name: str, devices: list[int] | None = None) -> list[Progress]:
    return [line async for line in box.lifecycle.add(request(box, name, devices))]
