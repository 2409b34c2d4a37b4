"""Reload of the configuration file.

A file with any error changes nothing. Changes that a running daemon can apply take effect at once;
other changes are listed and wait for a restart. No model and no process restarts. The effect is
declared beside each key (:class:`gpupoold.config.values.Effect`); keys without a handler here are
read at each use.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from gpupool_state import History, HistoryLimits
from gpupoold.api.schemas_config import ReloadInfo
from gpupoold.config.keys import KeyChange, change_info
from gpupoold.config.schema import Settings
from gpupoold.config.sections import HistorySettings
from gpupoold.config.values import Effect
from gpupoold.control.configuration import Configuration
from gpupoold.control.frontends.frontends import Frontends
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.worker_operations import WorkerOperations
from gpupoold.control.workers.roles import configured_roles
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import GpupoolError
from gpupoold.scheduling.events import QuotaMaxSet
from gpupoold.system.process import set_log_level


class Reloader:
    """Reloads of the configuration, one at a time, while serving continues."""

    def __init__(
        self,
        configuration: Configuration,
        history: History,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        frontends: Frontends,
        workers: WorkerOperations,
        cache: CacheControl,
    ) -> None:
        self._configuration = configuration
        self._settings = configuration.settings
        self._history = history
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._frontends = frontends
        self._workers = workers
        self._cache = cache
        self._reloading = asyncio.Lock()
        self._is_asked = False
        self._task: asyncio.Task[None] | None = None
        # The effects of changed keys, by the beginnings of the keys.
        self._effects: dict[tuple[str, ...], Callable[[Settings], None]] = {
            (
                "log.",
                "memory.self_check_interval",
                "server.max_body",
                "limits.max_",
            ): self._apply_to_processes,
            ("limits.",): self._apply_limits,
            ("history.",): self._apply_history,
            ("memory.model_cache",): self._apply_cache,
            ("memory.snapshot_files",): self._apply_saved,
            ("scheduling.quota_max",): self._apply_quota_max,
            ("scheduling.roles",): self._apply_roles,
        }

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
            changed = [one for one in changes if one.effect is not Effect.RESTART]
            waiting = [one for one in changes if one.effect is Effect.RESTART]
            for beginnings, apply in self._effects.items():
                if any(one.key.startswith(beginnings) for one in changed):
                    apply(before)
        text = _summary(changed, waiting)
        self._history.record_event("info", "config_reloaded", "gpupoold", text)
        path = self._configuration.path
        return ReloadInfo(
            path=None if path is None else str(path),
            changed=[change_info(one) for one in changed],
            waiting=[change_info(one) for one in waiting],
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

    def _apply_to_processes(self, before: Settings) -> None:
        set_log_level(self._settings.log.level)
        self._frontends.reconfigure()
        self._supervisor.reconfigure()

    def _apply_limits(self, before: Settings) -> None:
        self._dispatcher.set_limits(self._settings.limits)
        self._workers.limits = self._settings.limits

    def _apply_history(self, before: Settings) -> None:
        self._history.keep(history_limits(self._settings.history))

    def _apply_cache(self, before: Settings) -> None:
        self._cache.set_host_budget(self._settings.memory.model_cache_bytes)

    def _apply_saved(self, before: Settings) -> None:
        self._cache.set_disk_budget(self._settings.memory.snapshot_files_bytes)

    def _apply_quota_max(self, before: Settings) -> None:
        self._dispatcher.shell.handle(QuotaMaxSet(self._settings.scheduling.quota_max_s))

    def _apply_roles(self, before: Settings) -> None:
        pairs = zip(configured_roles(before), configured_roles(self._settings), strict=True)
        for number, (old, new) in enumerate(pairs):
            if new is not old:
                self._dispatcher.set_role(number, new, "by the configuration")


def _summary(changed: list[KeyChange], waiting: list[KeyChange]) -> str:
    parts = [f"changed {', '.join(one.key for one in changed)}"] if changed else []
    if waiting:
        parts.append(f"after a restart {', '.join(one.key for one in waiting)}")
    return "; ".join(parts) or "no changes"


def history_limits(settings: HistorySettings) -> HistoryLimits:
    """Return the maximum numbers of rows."""
    return HistoryLimits(
        num_requests=settings.max_requests,
        num_switches=settings.max_switches,
        num_events=settings.max_events,
        num_minutes=settings.max_minutes,
        num_usage_hours=settings.max_usage_hours,
        num_device_minutes=settings.max_device_minutes,
    )
