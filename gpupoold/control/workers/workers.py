"""The instances: one supervised process per device, restarted when it dies."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gpupoold.config.schema import Settings
from gpupoold.control.processes.child import Child, execute
from gpupoold.control.processes.crash_attribution import Death, death_of
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.processes.oom_kills import OomKills
from gpupoold.control.processes.reconfigure import reconfigure
from gpupoold.control.processes.restarts import keep_running
from gpupoold.control.processes.watchdog import Watch
from gpupoold.control.weights.cache import CachedImage
from gpupoold.control.workers.launch import arguments_of, module_of
from gpupoold.control.workers.worker import Instance
from gpupoold.errors import Failed, TimedOut, Unavailable, error_from_code
from gpupoold.system.activity import create_page, read_page
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 120.0
_READY_POLL_S = 0.05

V = TypeVar("V")
OnMessage = Callable[[Instance, m.FromInstance], None]
OnUp = Callable[[Instance], Awaitable[None]]
OnDown = Callable[[Instance, Death], Awaitable[None]]


class InstanceEnded(Failed):
    """The instance ended before it answered."""


class InstanceSupervisor:
    """Starts, watches and restarts the instances."""

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer,
        on_message: OnMessage,
        on_up: OnUp,
        on_down: OnDown,
    ) -> None:
        """``forks`` starts emulated devices. A GPU's process is a program of its own: which GPU
        it sees is settled before anything of CUDA's is loaded. ``on_down`` is told how the
        process ended, and what it was doing then."""
        self._settings = settings
        self._forks = forks
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self.instances = [Instance(i, device) for i, device in enumerate(settings.devices)]
        self._tasks: list[asyncio.Task[None]] = []
        self._next_call = 0
        self.oom_kills = OomKills()

    @property
    def any_ready(self) -> bool:
        """Whether some instance can load and serve."""
        return any(instance.is_ready for instance in self.instances)

    def start(self) -> None:
        """Start every instance; ``on_up`` is called for each when it is ready."""
        self._tasks = [
            asyncio.create_task(
                keep_running(
                    f"instance {instance.number}", functools.partial(self._run_once, instance)
                ),
                name=f"instance-{instance.number}",
            )
            for instance in self.instances
        ]

    async def stop(self) -> None:
        """Stop every instance within the grace time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        grace_s = self._settings.limits.stop_grace_s
        children = [instance.child for instance in self.instances if instance.child is not None]
        await asyncio.gather(*(child.stop(m.Shutdown(), grace_s) for child in children))
        for instance in self.instances:
            self._forget(instance, "the daemon is stopping")

    async def wait_ready(self, instance: Instance) -> None:
        """Return when the instance can load models.

        Raises:
            Unavailable: it did not come up in time.
        """
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not instance.is_ready:
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"instance {instance.number} is {instance.state}", "see `gpupool logs`"
                )
            await asyncio.sleep(_READY_POLL_S)

    async def device_bytes(self, instance: Instance) -> int:
        """Memory of the instance's device; waits until it is known.

        Raises:
            Unavailable: the instance did not come up in time.
        """
        await self.wait_ready(instance)
        assert instance.ready is not None
        return instance.ready.device_bytes

    async def load(
        self,
        instance: Instance,
        model: m.ModelToLoad,
        image: CachedImage | None,
        profiling_budget_s: float = 0.0,
    ) -> tuple[m.ModelLoaded, int | None]:
        """Load a model on an instance; returns what it learnt and a descriptor of the image,
        None from a device that makes none.

        Its steps are timed afterwards, for ``profiling_budget_s`` at most.

        Raises:
            GpupoolError: the instance's reason, or that it is down.
            TimedOut: over the configured load timeout.
        """
        if not instance.is_ready:
            raise Failed(f"instance {instance.number} is {instance.state}", "see `gpupool logs`")
        await instance.unloading.settled(model.name)
        future = instance.loading.expect(model.name)
        instance.models.add(model.name)  # even if nobody waits for the end of the load
        if image is None:
            instance.send(m.LoadModel(model, profiling_budget_s=profiling_budget_s))
        else:
            order = m.LoadModel(model, True, image.digest, profiling_budget_s, image.canary)
            instance.send(order, (image.fd,))
        try:
            async with asyncio.timeout(self._settings.limits.load_timeout_s):
                loaded = await future
        except TimeoutError:
            limit_s = self._settings.limits.load_timeout_s
            raise TimedOut(
                f"{model.name}: not loaded within {limit_s:g} s", "raise limits.load_timeout"
            ) from None
        finally:
            instance.loading.forget(model.name)
        return loaded, instance.image_fds.pop(model.name, None)

    async def unload(self, instance: Instance, name: str) -> None:
        """Drop a model from an instance; returns when its memory is free.

        Raises:
            TimedOut: the instance did not answer.
        """
        await instance.unloading.settled(name)
        if name not in instance.models:
            return
        future = instance.unloading.expect(name)
        instance.models.discard(name)
        instance.layouts.pop(name, None)
        instance.images.discard(name)
        instance.send(m.UnloadModel(name))
        try:
            await self._in_time(instance, future, f"let go of {name}")
        finally:
            instance.unloading.forget(name)
            _close(instance.image_fds.pop(name, None))

    async def give_image(self, instance: Instance, name: str, image: CachedImage) -> None:
        """Let a model on an instance have an image of its layout; returns when it can run.

        Raises:
            Failed: the instance cannot map or pin it, or is down.
            TimedOut: the instance did not answer.
        """
        if not instance.is_ready:
            raise Failed(f"instance {instance.number} is {instance.state}")
        future = instance.taking.expect(name)
        instance.send(m.TakeImage(name), (image.fd,))
        try:
            problem = await self._in_time(instance, future, f"take the image of {name}")
        except BaseException:
            instance.send(m.DropImage(name))  # it shall not have it later without being asked
            raise
        finally:
            instance.taking.forget(name)
        if problem:
            raise Failed(
                f"instance {instance.number} cannot take the image of {name}: {problem}",
                "see `gpupool logs`",
            )
        instance.images.add(name)

    async def drop_image(self, instance: Instance, name: str) -> None:
        """Let an instance give up its view of a model's image; returns when it has.

        Raises:
            TimedOut: the instance did not answer.
        """
        if name not in instance.images:
            return
        future = instance.dropping.expect(name)
        instance.images.discard(name)
        instance.send(m.DropImage(name))
        try:
            await self._in_time(instance, future, f"let the image of {name} go")
        finally:
            instance.dropping.forget(name)

    async def call(
        self,
        instance: Instance,
        method: str,
        *,
        limit_s: float | None = None,
        **arguments: object,
    ) -> object:
        """Run a named operation on an instance between two of its steps.

        ``limit_s`` None: the load timeout, for it may have to end a load before.

        Raises:
            GpupoolError: the operation's error, or that the instance is down.
            TimedOut: it did not answer within ``limit_s``.
        """
        if not instance.is_ready:
            raise Failed(f"instance {instance.number} is {instance.state}")
        self._next_call += 1
        call_id = self._next_call
        future = instance.calls.expect(call_id)
        instance.send(m.Call(call_id, method, dict(arguments)))
        try:
            return await self._in_time(instance, future, f"answer {method}", limit_s)
        finally:
            instance.calls.forget(call_id)

    async def _in_time(
        self,
        instance: Instance,
        future: asyncio.Future[V],
        what: str,
        limit_s: float | None = None,
    ) -> V:
        """The answer of an instance, which may have to end a load before."""
        limit_s = limit_s or self._settings.limits.load_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            raise TimedOut(
                f"instance {instance.number} did not {what} within {limit_s:g} s",
                "see `gpupool logs`",
            ) from None

    async def _run_once(self, instance: Instance) -> bool:
        """One life of a process; whether it had come up, and somebody else ended it."""
        activity_fd = create_page()
        try:
            return await self._live_once(instance, activity_fd)
        finally:
            os.close(activity_fd)

    async def _live_once(self, instance: Instance, activity_fd: int) -> bool:
        instance.state, instance.has_come_up = "starting", False
        log_path = self._settings.paths.log_dir / f"instance-{instance.number}.log"
        known = reconfigure(self._settings)
        child: Child[m.FromInstance] = await Child.start(
            f"instance {instance.number}",
            module_of(instance.device),
            arguments_of(self._settings, instance.number),
            m.FromInstance,
            log_path,
            fd_options={"--activity-fd": activity_fd},
            starter=self._forks.fork if instance.device.kind == "emulated" else execute,
        )
        instance.child, instance.watch = child, Watch(time.monotonic())
        if reconfigure(self._settings) != known:
            instance.send(reconfigure(self._settings))  # it has changed meanwhile
        try:
            while True:
                self._note(instance, await child.channel.receive())
        except ChannelClosed:
            pass
        except Exception:
            _logger.exception("a message of instance %d could not be handled", instance.number)
            self.end(instance, "it sent what could not be handled")
        status = await child.ended()
        activities = read_page(activity_fd)
        is_oom = self.oom_kills.is_new()
        death = death_of(status, instance.ended_for, activities, saw_oom_kill=is_oom)
        instance.state, instance.child, instance.watch = "down", None, None
        instance.num_restarts += 1
        self._forget(instance, f"instance {instance.number} ended ({death.reason})")
        _logger.error("instance %d ended (%s); see %s", instance.number, death.reason, log_path)
        await self._on_down(instance, death)
        return instance.has_come_up and not death.is_at_fault

    def reconfigure(self) -> None:
        """Tell all that run what the configuration says now."""
        for instance in self.instances:
            instance.send(reconfigure(self._settings))

    def end(self, instance: Instance, reason: str) -> None:
        """Kill the process that runs; it is replaced, and ``reason`` is what people are told."""
        if instance.child is not None and not instance.ended_for:
            _logger.error("instance %d is killed: %s", instance.number, reason)
            instance.ended_for = reason
            instance.child.kill()

    def _note(self, instance: Instance, message: m.FromInstance) -> None:
        now_s, watch = time.monotonic(), instance.watch
        assert watch is not None
        watch.heard(now_s)
        match message:
            case m.InstanceReady():
                watch.came_up(now_s)
                instance.ready = message
                if message.shares_kv_host:
                    instance.kv_host_fd = instance.take_fd()
                instance.state, instance.has_come_up = "ready", True
                task = asyncio.ensure_future(self._on_up(instance))
                instance.coming_up = task
                self._tasks.append(task)
                task.add_done_callback(self._tasks.remove)
                task.add_done_callback(functools.partial(self._has_come_up, instance))
            case m.ModelLoaded():
                self._note_loaded(instance, message)
            case m.ModelFailed():
                instance.models.discard(message.name)
                error = error_from_code(message.error_code, message.message, message.hint)
                instance.loading.reject(message.name, error)
            case m.ModelUnloaded():
                instance.unloading.resolve(message.name, None)
            case m.ImageDropped():
                instance.dropping.resolve(message.model, None)
            case m.ImageTaken():
                instance.taking.resolve(message.model, message.problem)
            case m.CallResult() if message.error_code:
                error = error_from_code(
                    message.error_code, message.error_message, message.error_hint
                )
                instance.calls.reject(message.call_id, error)
            case m.CallResult():
                instance.calls.resolve(message.call_id, message.result)
            case m.InstanceStatus():
                instance.status = message
                has_work = any(
                    one.num_live for one in message.models if one.model == message.on_turn
                )
                watch.stepped(now_s, message.num_steps, has_work=has_work)
            case _:
                self._on_message(instance, message)

    def _has_come_up(self, instance: Instance, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("setting instance %d up failed", instance.number, exc_info=error)
            if task is instance.coming_up:
                self.end(instance, f"it could not be set up: {error}")

    def _note_loaded(self, instance: Instance, message: m.ModelLoaded) -> None:
        name = message.model.name
        instance.layouts[name] = message.layout_digest
        if message.has_image:
            fd = instance.take_fd()
            instance.images.add(name)
            if name in instance.loading:
                instance.image_fds[name] = fd
            else:
                os.close(fd)  # who asked for it has left, and has it unloaded
        instance.loading.resolve(name, message)

    def _forget(self, instance: Instance, reason: str) -> None:
        """Everything that waited for this run of the instance fails with ``reason``."""
        if instance.coming_up is not None:
            instance.coming_up.cancel()
            instance.coming_up = None
        died = InstanceEnded(reason, "see `gpupool logs`")
        instance.loading.reject_all(died)
        instance.taking.reject_all(died)
        instance.calls.reject_all(died)
        instance.unloading.resolve_all(None)
        instance.dropping.resolve_all(None)
        for fd in instance.image_fds.values():
            os.close(fd)
        instance.image_fds.clear()
        _close(instance.kv_host_fd)
        instance.kv_host_fd = None
        instance.models.clear()
        instance.layouts.clear()
        instance.images.clear()
        instance.status = None
        instance.ended_for = ""


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
