"""The workers: one supervised process per device, restarted after each end."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from typing import TypeVar

from gpupoold.config.schema import Settings
from gpupoold.control.processes.child import Child, execute
from gpupoold.control.processes.crash_attribution import death_of
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.processes.handlers import Handlers
from gpupoold.control.processes.oom_kills import OomKills
from gpupoold.control.processes.reconfigure import reconfigure
from gpupoold.control.processes.restarts import keep_running
from gpupoold.control.processes.watchdog import Watch
from gpupoold.control.weights.cache import CachedSnapshot
from gpupoold.control.workers.launch import arguments_of, module_of
from gpupoold.control.workers.worker import Worker
from gpupoold.errors import Failed, TimedOut, Unavailable, error_from_code
from gpupoold.system.activity import create_page, read_page
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 120.0
_READY_POLL_S = 0.05

V = TypeVar("V")


class WorkerEnded(Failed):
    """The worker ended before answering."""


class WorkerSupervisor:
    """Starts, watches and restarts the workers."""

    def __init__(self, settings: Settings, forks: ForkServer) -> None:
        """``forks`` starts emulated devices.

        A GPU's process is a program of its own, because the choice of the GPU must precede any use
        of CUDA.
        """
        self._settings = settings
        self._forks = forks
        self._handlers: Handlers[Worker, m.FromWorker] | None = None
        self.workers = [Worker(i, device) for i, device in enumerate(settings.devices)]
        self._tasks: list[asyncio.Task[None]] = []
        self._next_call = 0
        self.oom_kills = OomKills()

    @property
    def any_ready(self) -> bool:
        """True if some worker can load and serve."""
        return any(worker.is_ready for worker in self.workers)

    def start(self, handlers: Handlers[Worker, m.FromWorker]) -> None:
        """Start every worker; ``handlers.on_up`` is called for each ready worker."""
        self._handlers = handlers
        self._tasks = [
            asyncio.create_task(
                keep_running(f"worker {worker.number}", functools.partial(self._run_once, worker)),
                name=f"worker-{worker.number}",
            )
            for worker in self.workers
        ]

    async def stop(self) -> None:
        """Stop every worker within the grace time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        grace_s = self._settings.limits.stop_grace_s
        children = [worker.child for worker in self.workers if worker.child is not None]
        await asyncio.gather(*(child.stop(m.Shutdown(), grace_s) for child in children))
        for worker in self.workers:
            self._forget(worker, "the daemon is stopping")

    async def wait_ready(self, worker: Worker) -> None:
        """Return when the worker can load models.

        Raises:
            Unavailable: the worker did not come up in time.
        """
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not worker.is_ready:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"worker {worker.number} is {worker.state}", "see `gpupool logs`")
            await asyncio.sleep(_READY_POLL_S)

    async def device_bytes(self, worker: Worker) -> int:
        """Memory of the worker's device; waits until it is known.

        Raises:
            Unavailable: the worker did not come up in time.
        """
        await self.wait_ready(worker)
        assert worker.ready is not None
        return worker.ready.device_bytes

    async def load(
        self,
        worker: Worker,
        model: m.ModelToLoad,
        snapshot: CachedSnapshot | None,
        profiling_budget_s: float = 0.0,
    ) -> tuple[m.ModelLoaded, int | None]:
        """Load a model on a worker; return its facts and a descriptor of the snapshot.

        The descriptor is None from a device without snapshots. Steps are then profiled for at most
        ``profiling_budget_s``.

        Raises:
            GpupoolError: the worker's reason, or the worker is down.
            TimedOut: the load exceeded the configured time.
        """
        if not worker.is_ready:
            raise Failed(f"worker {worker.number} is {worker.state}", "see `gpupool logs`")
        await worker.unloading.settled(model.name)
        future = worker.loading.expect(model.name)
        worker.models.add(model.name)  # even if nobody waits for the end of the load
        if snapshot is None:
            worker.send(m.LoadModel(model, profiling_budget_s=profiling_budget_s))
        else:
            order = m.LoadModel(
                model, True, snapshot.digest, profiling_budget_s, snapshot.self_check
            )
            worker.send(order, (snapshot.fd,))
        try:
            async with asyncio.timeout(self._settings.limits.load_timeout_s):
                loaded = await future
        except TimeoutError:
            limit_s = self._settings.limits.load_timeout_s
            raise TimedOut(
                f"{model.name}: not loaded within {limit_s:g} s", "raise limits.load_timeout"
            ) from None
        finally:
            worker.loading.forget(model.name)
        return loaded, worker.snapshot_fds.pop(model.name, None)

    async def unload(self, worker: Worker, name: str) -> None:
        """Drop a model from a worker; returns when its memory is free.

        Raises:
            TimedOut: the worker did not answer.
        """
        await worker.unloading.settled(name)
        if name not in worker.models:
            return
        future = worker.unloading.expect(name)
        worker.models.discard(name)
        worker.layouts.pop(name, None)
        worker.snapshots.discard(name)
        worker.send(m.UnloadModel(name))
        try:
            await self._in_time(worker, future, f"let go of {name}")
        finally:
            worker.unloading.forget(name)
            _close(worker.snapshot_fds.pop(name, None))

    async def give_snapshot(self, worker: Worker, name: str, snapshot: CachedSnapshot) -> None:
        """Attach a snapshot of the right layout to a model on a worker; return when it can run.

        Raises:
            Failed: the worker cannot map or pin the snapshot, or is down.
            TimedOut: the worker did not answer.
        """
        if not worker.is_ready:
            raise Failed(f"worker {worker.number} is {worker.state}")
        future = worker.taking.expect(name)
        worker.send(m.TakeSnapshot(name), (snapshot.fd,))
        try:
            problem = await self._in_time(worker, future, f"take the snapshot of {name}")
        except BaseException:
            worker.send(m.DropSnapshot(name))  # it shall not have it later without being asked
            raise
        finally:
            worker.taking.forget(name)
        if problem:
            raise Failed(
                f"worker {worker.number} cannot take the snapshot of {name}: {problem}",
                "see `gpupool logs`",
            )
        worker.snapshots.add(name)

    async def drop_snapshot(self, worker: Worker, name: str) -> None:
        """Make a worker release a model's snapshot; return after the release.

        Raises:
            TimedOut: the worker did not answer.
        """
        if name not in worker.snapshots:
            return
        future = worker.dropping.expect(name)
        worker.snapshots.discard(name)
        worker.send(m.DropSnapshot(name))
        try:
            await self._in_time(worker, future, f"let the snapshot of {name} go")
        finally:
            worker.dropping.forget(name)

    async def call(
        self,
        worker: Worker,
        method: str,
        *,
        limit_s: float | None = None,
        **arguments: object,
    ) -> object:
        """Run a named operation on a worker between two steps.

        ``limit_s`` None means the load timeout, because a load may have to finish before.

        Raises:
            GpupoolError: the operation's error, or the worker is down.
            TimedOut: no answer within ``limit_s``.
        """
        if not worker.is_ready:
            raise Failed(f"worker {worker.number} is {worker.state}")
        self._next_call += 1
        call_id = self._next_call
        future = worker.calls.expect(call_id)
        worker.send(m.Call(call_id, method, dict(arguments)))
        try:
            return await self._in_time(worker, future, f"answer {method}", limit_s)
        finally:
            worker.calls.forget(call_id)

    async def _in_time(
        self,
        worker: Worker,
        future: asyncio.Future[V],
        what: str,
        limit_s: float | None = None,
    ) -> V:
        """Return a worker's answer; a load may have to finish before."""
        limit_s = limit_s or self._settings.limits.load_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            raise TimedOut(
                f"worker {worker.number} did not {what} within {limit_s:g} s",
                "see `gpupool logs`",
            ) from None

    async def _run_once(self, worker: Worker) -> bool:
        """Run one process to its end; return whether it had come up and was ended on purpose."""
        activity_fd = create_page()
        try:
            return await self._live_once(worker, activity_fd)
        finally:
            os.close(activity_fd)

    async def _live_once(self, worker: Worker, activity_fd: int) -> bool:
        worker.state, worker.has_come_up = "starting", False
        log_path = self._settings.paths.log_dir / f"worker-{worker.number}.log"
        known = reconfigure(self._settings)
        child: Child[m.FromWorker] = await Child.start(
            f"worker {worker.number}",
            module_of(worker.device),
            arguments_of(self._settings, worker.number),
            m.FromWorker,
            log_path,
            fd_options={"--activity-fd": activity_fd},
            starter=self._forks.fork if worker.device.kind == "emulated" else execute,
        )
        worker.child, worker.watch = child, Watch(time.monotonic())
        if reconfigure(self._settings) != known:
            worker.send(reconfigure(self._settings))  # it has changed meanwhile
        try:
            while True:
                self._note(worker, await child.channel.receive())
        except ChannelClosed:
            pass
        except Exception:
            _logger.exception("a message of worker %d could not be handled", worker.number)
            self.end(worker, "it sent what could not be handled")
        status = await child.ended()
        activities = read_page(activity_fd)
        is_oom = self.oom_kills.is_new()
        death = death_of(status, worker.ended_for, activities, saw_oom_kill=is_oom)
        worker.state, worker.child, worker.watch = "down", None, None
        worker.num_restarts += 1
        self._forget(worker, f"worker {worker.number} ended ({death.reason})")
        _logger.error("worker %d ended (%s); see %s", worker.number, death.reason, log_path)
        assert self._handlers is not None
        await self._handlers.on_down(worker, death)
        return worker.has_come_up and not death.is_at_fault

    def reconfigure(self) -> None:
        """Send the present configuration to all running workers."""
        for worker in self.workers:
            worker.send(reconfigure(self._settings))

    def end(self, worker: Worker, reason: str) -> None:
        """Kill the process, which is then replaced; ``reason`` goes to the log and events."""
        if worker.child is not None and not worker.ended_for:
            _logger.error("worker %d is killed: %s", worker.number, reason)
            worker.ended_for = reason
            worker.child.kill()

    def _note(self, worker: Worker, message: m.FromWorker) -> None:
        now_s, watch, handlers = time.monotonic(), worker.watch, self._handlers
        assert watch is not None
        assert handlers is not None
        watch.heard(now_s)
        match message:
            case m.WorkerReady():
                watch.came_up(now_s)
                worker.ready = message
                if message.shares_kv_host:
                    worker.kv_host_fd = worker.take_fd()
                worker.state, worker.has_come_up = "ready", True
                task = asyncio.ensure_future(handlers.on_up(worker))
                worker.coming_up = task
                self._tasks.append(task)
                task.add_done_callback(self._tasks.remove)
                task.add_done_callback(functools.partial(self._has_come_up, worker))
            case m.ModelLoaded():
                self._note_loaded(worker, message)
            case m.ModelFailed():
                worker.models.discard(message.name)
                error = error_from_code(message.error_code, message.message, message.hint)
                worker.loading.reject(message.name, error)
            case m.ModelUnloaded():
                worker.unloading.resolve(message.name, None)
            case m.SnapshotDropped():
                worker.dropping.resolve(message.model, None)
            case m.SnapshotTaken():
                worker.taking.resolve(message.model, message.problem)
            case m.CallResult() if message.error_code:
                error = error_from_code(
                    message.error_code, message.error_message, message.error_hint
                )
                worker.calls.reject(message.call_id, error)
            case m.CallResult():
                worker.calls.resolve(message.call_id, message.result)
            case m.WorkerStatus():
                worker.status = message
                has_work = any(
                    one.num_live for one in message.models if one.model == message.on_turn
                )
                watch.stepped(now_s, message.num_steps, has_work=has_work)
            case _:
                handlers.on_message(worker, message)

    def _has_come_up(self, worker: Worker, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("setting worker %d up failed", worker.number, exc_info=error)
            if task is worker.coming_up:
                self.end(worker, f"it could not be set up: {error}")

    def _note_loaded(self, worker: Worker, message: m.ModelLoaded) -> None:
        name = message.model.name
        worker.layouts[name] = message.layout_digest
        if message.has_snapshot:
            fd = worker.take_fd()
            worker.snapshots.add(name)
            if name in worker.loading:
                worker.snapshot_fds[name] = fd
            else:
                os.close(fd)  # who asked for it has left, and has it unloaded
        worker.loading.resolve(name, message)

    def _forget(self, worker: Worker, reason: str) -> None:
        """Fail everything that waits for this run of the worker, with ``reason``."""
        if worker.coming_up is not None:
            worker.coming_up.cancel()
            worker.coming_up = None
        died = WorkerEnded(reason, "see `gpupool logs`")
        worker.loading.reject_all(died)
        worker.taking.reject_all(died)
        worker.calls.reject_all(died)
        worker.unloading.resolve_all(None)
        worker.dropping.resolve_all(None)
        for fd in worker.snapshot_fds.values():
            os.close(fd)
        worker.snapshot_fds.clear()
        _close(worker.kv_host_fd)
        worker.kv_host_fd = None
        worker.models.clear()
        worker.layouts.clear()
        worker.snapshots.clear()
        worker.status = None
        worker.ended_for = ""


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
