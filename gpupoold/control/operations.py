"""An operator's changes of the running daemon: configuration, roles and drains."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from gpupool_state import HistoryLimits
from gpupoold.api.schemas import ChangeInfo, ConfigInfo, DiffInfo, ReloadInfo
from gpupoold.config.budgets import MODEL_CACHE
from gpupoold.config.file import ConfigFile, parsed_file, read_config_file
from gpupoold.config.fitting import Update, fitted, update_of
from gpupoold.config.keys import config_info
from gpupoold.config.machine import Machine
from gpupoold.config.schema import RunningSettings, Settings
from gpupoold.config.sections import HistorySettings
from gpupoold.control.frontends import Frontends
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.models.parts import ControlParts
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker, configured_roles
from gpupoold.doctor.machine import find_machine
from gpupoold.domain import Role
from gpupoold.errors import GpupoolError, TimedOut, no_such_device
from gpupoold.scheduling.events import QuotaMaxSet
from gpupoold.system.process import set_log_level

_DRAIN_POLL_S = 0.02


class Reloader:
    """Reloads of the configuration, one at a time, while serving continues.

    A file with any error changes nothing. Changes that a running daemon can apply take effect at
    once; other changes are listed and wait for a restart. No model and no process restarts. The
    effect is declared beside each key (:class:`gpupoold.config.values.Effect`); keys without a
    handler here are read at each use.
    """

    def __init__(
        self,
        parts: ControlParts,
        configuration: Configuration,
        frontends: Frontends,
        cache: CacheControl,
    ) -> None:
        self._configuration = configuration
        self._settings = configuration.settings
        self._history = parts.history
        self._dispatcher = parts.dispatcher
        self._supervisor = parts.supervisor
        self._frontends = frontends
        self._cache = cache
        self._reloading = asyncio.Lock()
        self._is_asked = False
        self._task: asyncio.Task[None] | None = None

    async def reload(self) -> ReloadInfo:
        """Read the file and apply the changes.

        Raises:
            ConfigError: the file has an error; nothing has changed.
            Refused: a change is impossible now; nothing has changed.
        """
        async with self._reloading:
            try:
                file = await self._configuration.read()
                update = await self._configuration.update_of(file)
                settings, changes = update.fitted.settings, update.changes
                if settings.memory.model_cache_bytes < self._settings.memory.model_cache_bytes:
                    await self._cache.check_budget(settings.memory.model_cache_bytes)
            except GpupoolError as error:
                text = f"the configuration is unchanged: {error}"
                self._history.record_event("error", "config_refused", "gpupoold", text)
                raise
            before = self._settings.model_copy()
            self._configuration.take(file, update)
            changed = [change for change in changes if change.effect != "restart"]
            waiting = [change for change in changes if change.effect == "restart"]
            self._apply(before, [change.key for change in changed])
        text = _summary(changed, waiting)
        self._history.record_event("info", "config_reloaded", "gpupoold", text)
        path = self._configuration.path
        return ReloadInfo(
            path=None if path is None else str(path),
            changed=changed,
            waiting=waiting,
        )

    def begin(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Reload after a signal, inside of ``around()``; errors are logged.

        A signal during a reload starts another reload: the file may have changed meanwhile.
        """
        self._is_asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._reload_while_asked(around), name="reload")

    async def _reload_while_asked(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        while self._is_asked:
            self._is_asked = False
            with around(), contextlib.suppress(GpupoolError):
                await self.reload()

    def _apply(self, before: Settings, keys: list[str]) -> None:
        """Let the parts that do not read the changed ``keys`` at each use follow the changes."""

        def has(*beginnings: str) -> bool:
            return any(key.startswith(beginnings) for key in keys)

        now = self._settings
        if has("log.", "memory.self_check_interval", "server.max_body", "limits.max_"):
            set_log_level(now.log.level)
            self._frontends.reconfigure()
            self._supervisor.reconfigure()
        if has("limits."):
            self._dispatcher.set_limits(now.limits)
        if has("history."):
            self._history.keep(history_limits(now.history))
        if has("memory.model_cache"):
            self._cache.set_host_budget(now.memory.model_cache_bytes)
        if has("memory.snapshot_files"):
            self._cache.set_disk_budget(now.memory.snapshot_files_bytes)
        if has("scheduling.quota_max"):
            self._dispatcher.shell.handle(QuotaMaxSet(now.scheduling.quota_max_s))
        if has("scheduling.roles"):
            pairs = zip(configured_roles(before), configured_roles(now), strict=True)
            for number, (old, new) in enumerate(pairs):
                if new is not old:
                    self._dispatcher.set_role(number, new, "by the configuration")


def _summary(changed: list[ChangeInfo], waiting: list[ChangeInfo]) -> str:
    parts = [f"changed {', '.join(change.key for change in changed)}"] if changed else []
    if waiting:
        parts.append(f"after a restart {', '.join(change.key for change in waiting)}")
    return "; ".join(parts) or "no changes"


def history_limits(settings: HistorySettings) -> HistoryLimits:
    return HistoryLimits(**settings.model_dump())


class Configuration:
    """The configuration of a running daemon, and comparisons with files; one per daemon.

    ``path`` is the path of the file read last, None without a file. Budgets that the file leaves
    out are worked out from the machine at the start, and again at each reload.
    """

    def __init__(
        self,
        file: ConfigFile,
        named: Path | None = None,
        machine: Callable[[Settings], Machine] = find_machine,
    ) -> None:
        """Start with ``file``; ``named`` is the path on the command line.

        ``named`` None means the file of :func:`gpupoold.config.schema.chosen_path`. ``machine``
        returns the facts about the machine. Raises SettingError: the machine has too little memory
        for the file's budgets.
        """
        self._named = named
        self._machine = machine
        self._written = file.written
        self.path = file.path
        start = fitted(file.settings, machine(file.settings))
        self.budgets = start.budgets
        self.settings = RunningSettings.of(start.settings)
        self._reasons = dict(start.budgets.reasons)

    def info(self) -> ConfigInfo:
        """Return all keys with their present values, and the arithmetic of budgets."""
        return config_info(self.settings, self.path, self._written, self._reasons)

    def why_model_cache(self) -> str:
        """Return the arithmetic of the model cache; empty if the file sets the size."""
        return self._reasons.get(MODEL_CACHE, "")

    async def diff(self, text: str | None = None, name: str = "") -> DiffInfo:
        """Return the changes that a file would make: ``text`` called ``name``, or the daemon's
        file.
        """
        file = await self.read() if text is None else parsed_file(text, Path(name))
        update = await self.update_of(file)
        path = None if file.path is None else str(file.path)
        return DiffInfo(path=path, changes=update.changes)

    async def read(self) -> ConfigFile:
        """Read the file again."""
        return await asyncio.to_thread(read_config_file, self._named)

    async def update_of(self, file: ConfigFile) -> Update:
        """Return the effect of a file on the running daemon.

        Raises SettingError: the machine has too little memory for the file's budgets.
        """
        now = await asyncio.to_thread(self._machine, self.settings)
        then = await asyncio.to_thread(self._machine, file.settings)
        return update_of(self.settings, file.settings, now, then)

    def take(self, file: ConfigFile, update: Update) -> None:
        """Apply the part of ``update``, the effect of ``file``, that needs no restart."""
        waiting = {change.key for change in update.changes if change.effect == "restart"}
        self._written = (file.written - waiting) | (self._written & waiting)
        self._reasons = {key: text for key, text in self._reasons.items() if key in waiting} | {
            key: text for key, text in update.reasons.items() if key not in waiting
        }
        self.path = file.path
        self.budgets = update.fitted.budgets
        self.settings.take(update.fitted.settings)


class WorkerOperations:
    """Role changes and drains by an operator."""

    def __init__(
        self, settings: Settings, dispatcher: Dispatcher, workers: Sequence[Worker]
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._workers = workers

    def set_role(self, number: int, role: Role | None) -> None:
        """Set a worker's role; None leaves the choice to the policy."""
        self._dispatcher.set_role(self.worker(number).number, role)

    async def drain(self, number: int) -> None:
        """Drain a worker: return when no requests are left; ``undrain`` ends the state.

        Raises:
            UsageError: there is no such worker.
            TimedOut: requests were left after ``limits.drain_timeout``; the drain continues.
        """
        self._dispatcher.set_draining(self.worker(number).number, is_draining=True)
        limit_s = self._settings.limits.drain_timeout_s
        deadline_s = time.monotonic() + limit_s
        while num_left := self._dispatcher.nums_of_requests([number])[0]:
            if time.monotonic() > deadline_s:
                raise TimedOut(
                    f"worker {number} still has {num_left} requests after {limit_s:g} s",
                    "the requests continue there; see `gpupool ps`, or run `gpupool drain` again",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    def undrain(self, number: int) -> None:
        """End the drain of a worker."""
        self._dispatcher.set_draining(self.worker(number).number, is_draining=False)

    def worker(self, number: int) -> Worker:
        workers = self._workers
        if not 0 <= number < len(workers):
            raise no_such_device(number, len(workers))
        return workers[number]
