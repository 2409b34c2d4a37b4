"""All parts that look after models, over workers whose processes the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gpupool_state import History, Registry
from gpupoold.checkpoints.survey import encoded
from gpupoold.config.schema import Settings, parse_settings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.frontends import Frontends
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.lifecycle import ModelLifecycle
from gpupoold.control.models.parts import ControlParts
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.processes.child import ForkServer, Launch
from gpupoold.control.processes.supervised import ProcessHandlers, Timing
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.kept_snapshots import SavedSnapshots, SnapshotKeys, StoredSnapshots
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import DeviceFacts, ModelName, ModelSpec, ModelState, Priority
from gpupoold.errors import GpupoolError
from gpupoold.memory.libc import create_memfd
from gpupoold.scheduling.policies.named import make_policy
from gpupoold.system.activity import ActivityPage, ThreadPhase
from gpupoold.system.systemd import FdStore, Notifier
from gpupoold.wire import messages as m
from gpupoold.wire.channel import AsyncChannel, ChannelClosed
from gpupoold.worker.inspection.__main__ import _found
from tests.unit.control.loaded import loaded

PAGE = 4096
TIMEOUT_S = 20
QUICK_TIME = Timing(sleep=lambda wait_s: asyncio.sleep(wait_s / 20))
"""Workers that end are started again without long waits."""
LAYOUT = "layout"


class PlayedWorker:
    """A worker's process, which loads whatever it is told, unless the test has other plans."""

    pid = 4711

    def __init__(self, launch: Launch, number: int, box: ModelsBox) -> None:
        sock = socket.socket(fileno=socket.dup(launch.fd_options["--wire-fd"]))
        self.channel: AsyncChannel[Any] = AsyncChannel(sock, m.ToWorker)
        self.activity = ActivityPage()
        self.activity.attach(os.dup(launch.fd_options["--activity-fd"]))
        self._box, self._number = box, number
        self._unanswered: list[str] = []
        self._kept = ""
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)
            self.channel.close()

    async def _serve(self) -> None:
        if self._number in self._box.broken:
            self.end(1)
            return
        if (event := self._box.starting.get(self._number)) is not None:
            await event.wait()
        degree = self._box.degrees[self._number]
        kind = "cuda" if degree == 1 else f"{degree} x cuda"
        self.channel.send(
            m.WorkerReady(
                DeviceFacts(
                    *(self._box.device_bytes, PAGE, 1e9),
                    rank_nodes=(self._number,),
                    far_share=self._box.far_share,
                ),
                "0.32.0",
                kind,
            )
        )
        with contextlib.suppress(ChannelClosed):
            while True:
                message = await self.channel.receive()
                if isinstance(message, m.LoadModel):
                    await self._box.may_load(message.model.name, self._number)
                self._answer(message)

    def _answer(self, message: m.Message) -> None:
        match message:
            case m.LoadModel():
                self._load(message)
            case m.UnloadModel():
                self._box.told.append(f"unload {message.name} on {self._number}")
                if message.name in self._unanswered:
                    self._unanswered.remove(message.name)
                    self.channel.send(m.ModelFailed(message.name, "failed", "unloaded meanwhile"))
                freed = m.EngineMemory(self._box.engine_bytes, 0)
                self._kept = message.name if message.keeps_engine else ""
                self.channel.send(m.ModelUnloaded(message.name, freed, message.keeps_engine))
            case m.DropSnapshot():
                self._box.told.append(f"drop {message.model} on {self._number}")
                self.channel.send(m.SnapshotDropped(message.model))
            case m.TakeSnapshot():
                os.close(self.channel.take_fd())
                self._box.told.append(f"take {message.model} on {self._number}")
                self.channel.send(m.SnapshotTaken(message.model, self._box.take_problem))
            case m.AbortRequests():
                self._box.told.append(f"abort {message.request_ids[0]} on {self._number}")
            case m.AddRequest():
                self._box.requests.setdefault(self._number, []).append(message.request_id)
            case m.Call():
                self._box.told.append(f"{message.method} on {self._number}")
                answer = {"problem": self._box.problem}
                self.channel.send(m.CallResult(message.call_id, answer))
            case m.SetTargets():
                self._box.targets[message.name, self._number] = message.ttft_s
            case m.Shutdown():
                self.end(0)

    def _load(self, order: m.LoadModel) -> None:
        name = order.model.name
        fd = self.channel.take_fd() if order.has_snapshot else create_memfd(name, PAGE)
        kept, self._kept = self._kept, ""
        how = f"bind to {kept}:" if kept else "attach" if order.has_snapshot else "build"
        self._box.told.append(f"{how} {name} on {self._number}")
        error = self._box.errors.get(name) or self._box.errors.get(f"{name} on {self._number}")
        if name in self._box.deadly:
            self.activity.main.set(ThreadPhase.LOAD, name)
            self.end(-signal.SIGSEGV)
        elif error is not None:
            self.channel.send(m.ModelFailed(name, error.code, error.message))
        elif name in self._box.slow:
            self._unanswered.append(name)
        else:
            dropped = self._box.requests.pop(self._number, [])
            layout = f"{LAYOUT}{self._box.degrees[self._number]}"
            assert order.layout_digest in ("", layout), "a snapshot of another degree"
            answer = m.ModelLoaded(loaded(name), layout, True, self_check=(1, 2), dropped=dropped)
            answer.memory, answer.engine_of = m.EngineMemory(self._box.engine_bytes, 0), kept
            answer.family = self._box.family
            self.channel.send(answer, (fd,))
        os.close(fd)


class PlayedInspector(Inspector):
    """The process with vLLM's own classes: what it was asked to check, and where files were.

    Files are read in a thread, as a process would (``tests/functional/test_inspection.py``).
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, ForkServer(settings, {}, ()))
        self.asked: list[tuple[str, list[str]]] = []
        self.error: GpupoolError | None = None
        self.undivided: dict[int, str] = {}

    async def check(self, spec: ModelSpec, degrees: Iterable[int] = ()) -> dict[int, str]:
        files = [path.name for path in Path(spec.path).iterdir() if not path.name.startswith(".")]
        self.asked.append((spec.name, sorted(files)))
        if self.error is not None:
            raise self.error
        return {one: self.undivided[one] for one in degrees if one in self.undivided}

    async def check_chat(self, spec: ModelSpec) -> None:
        """Accept every template."""

    async def _ask(self, name: str, order: m.ToInspection) -> m.Inspected:
        assert not isinstance(order, m.Inspect)
        return m.Inspected(result=encoded(await asyncio.to_thread(_found, order)))


class ServedModels:
    """The frontends: which models they were told of, and which APIs they have mounted."""

    def __init__(self) -> None:
        self.lists: list[m.ModelList] = []
        self.mounted: set[str] = set()
        self.num_mounts = Counter[str]()
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.may_mount = asyncio.Event()
        self.may_mount.set()
        self.error: GpupoolError | None = None

    def send(self, message: m.Message) -> None:
        if isinstance(message, m.ModelList):
            self.lists.append(message)
        elif isinstance(message, m.StopServing):
            self.mounted.discard(message.name)

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        if self.error is not None:
            raise self.error
        self.num_mounts[model.name] += 1
        await self.may_mount.wait()
        self.mounted.add(model.name)
        self.aliases[model.name] = model.aliases

    def states_of(self, model: str) -> list[str]:
        """What clients have seen of a model, one after another."""
        return [one.state for told in self.lists for one in told.models if one.name == model]

    def states(self) -> dict[str, str]:
        """What a client sees now."""
        return {one.name: one.state for one in self.lists[-1].models}


class ModelsBox:
    """A registry, a fleet and two workers; room in host memory for ``num_snapshots``."""

    def __init__(
        self,
        folder: Path,
        registry: Registry,
        history: History,
        num_snapshots: int = 1024,
        load_timeout_s: float = 1.0,
        memory: Mapping[str, object] | None = None,
        devices: Sequence[str] = ("cuda:0", "cuda:1"),
    ) -> None:
        self.folder, self.registry, self.history = folder, registry, history
        self.told: list[str] = []
        self.deadly: set[str] = set()
        self.slow: set[str] = set()
        self.errors: dict[str, GpupoolError] = {}
        self.requests: dict[int, list[str]] = {}
        """The requests in the engines of each worker."""
        self.targets: dict[tuple[str, int], float] = {}
        """The times to the first token that workers were told of, by model and worker."""
        self.take_problem = ""
        self.problem = ""
        """The first answer that differs in a verification."""
        self.device_bytes = 1 << 30
        self.far_share = 1.0
        """Each device is on a NUMA node of its own, whose memory is equally fast for others."""
        self.broken: set[int] = set()
        self.replies: list[m.Message] = []
        self.engine_bytes = 0
        self.family = ""
        self.held: dict[int, asyncio.Event] = {}
        """Loads on these workers wait for the event."""
        self.starting: dict[int, asyncio.Event] = {}
        """These workers wait for the event before they are ready."""
        self.waiting: set[tuple[str, int]] = set()
        """The loads that wait, by model and worker."""
        (folder / "hf").mkdir(exist_ok=True)
        paths = {f"{name}_dir": str(folder) for name in ("state", "runtime", "log")}
        settings = parse_settings(
            {
                "devices": list(devices),
                "memory": {"kv_host": "1GiB", **(memory or {})},
                "paths": {**paths, "hf_cache": [str(folder / "hf")]},
                "limits": {
                    "stop_grace": 0.05,
                    "load_timeout": load_timeout_s,
                    "drain_timeout": 0.2,
                },
            },
            "test",
        )
        self.degrees = [one.num_gpus for one in settings.devices]
        keys = SnapshotKeys()
        stored = StoredSnapshots(FdStore(Notifier()), keys)
        self.cache = SnapshotCache(num_snapshots * PAGE, stored)
        self.saved = SavedSnapshots(folder / "snapshots", 1 << 20, keys)
        self.fleet = Fleet(self.cache, degrees=self.degrees)
        self.supervisor = WorkerSupervisor(
            settings, ForkServer(settings, {}, ()), self.fleet.hosts, self._start, QUICK_TIME
        )
        self.frontends = ServedModels()
        self.inspector = PlayedInspector(settings)
        policy = make_policy("gpupool")
        self.dispatcher = Dispatcher(
            settings, history, policy, self.fleet, lambda _, message: self.replies.append(message)
        )
        parts = ControlParts(
            settings, registry, history, self.fleet, self.dispatcher, self.supervisor
        )
        self.snapshots = snapshots = ModelSnapshots(parts, self.cache, self.saved, stored)
        self.lifecycle = ModelLifecycle(
            parts, cast(Frontends, self.frontends), snapshots, self.cache, self.inspector
        )
        self.dispatcher.listener = self.lifecycle
        self.cache_control = CacheControl(
            parts, self.lifecycle, self.cache, snapshots.host_budget, self.saved
        )
        self.processes: dict[int, PlayedWorker] = {}

    def hold(self, *numbers: int) -> None:
        """Let loads on these workers wait for ``release``."""
        self.held = {number: asyncio.Event() for number in numbers}

    def release(self) -> None:
        for event in self.held.values():
            event.set()
        self.held = {}

    async def may_load(self, model: str, number: int) -> None:
        if (event := self.held.get(number)) is not None:
            self.waiting.add((model, number))
            await event.wait()
            self.waiting.discard((model, number))

    def hosts_of(self, model: str) -> list[int]:
        """The devices that have a model's engine."""
        return sorted(self.fleet.availability(model).devices)

    async def _start(self, launch: Launch) -> PlayedWorker:
        number = int(launch.arguments[launch.arguments.index("--device") + 1])
        self.processes[number] = PlayedWorker(launch, number, self)
        return self.processes[number]

    async def register(self, *names: str) -> None:
        """Models as of an earlier life of the daemon."""
        for name in names:
            checkpoint = self.folder / name
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / "config.json").write_text(name)
            await self.registry.add(ModelSpec(ModelName(name), name, str(checkpoint)))
            await self.registry.set_state(name, ModelState.READY)
            self.fleet.restore([row for row in [await self.registry.get(name)] if row])

    async def start(self) -> None:
        """Start the workers; return when they have loaded what they can."""
        self.lifecycle.controller.start()
        on_up = self.lifecycle.controller.worker_up
        on_down = self.lifecycle.worker_down
        self.supervisor.start(ProcessHandlers(self.dispatcher.from_worker, on_up, on_down))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_ready(self, *names: str) -> None:
        """On both workers."""
        await self.until(
            lambda: all(
                self.fleet.availability(name).can_serve
                and len(self.fleet.availability(name).devices) == 2
                for name in names
            )
        )

    def ask(self, model: str, request_id: str, priority: Priority = Priority.NORMAL) -> None:
        now_s = asyncio.get_running_loop().time()
        order = m.AddRequest(model, request_id, now_s, 2, 8, [b""], priority=priority)
        self.dispatcher.from_frontend(order)

    async def events(self) -> list[str]:
        await self.history.flush()
        return [one.kind for one in await self.history.events_after(0, 1000)]

    async def stop(self) -> None:
        await self.supervisor.stop()
        await self.lifecycle.stop()
        await self.saved.stop()
        self.cache.close()


@contextlib.asynccontextmanager
async def running(box: ModelsBox, *names: str) -> AsyncIterator[ModelsBox]:
    """A box whose workers have loaded these models."""
    await box.register(*names)
    await box.start()
    try:
        await box.until_ready(*names)
        yield box
    finally:
        await box.stop()
