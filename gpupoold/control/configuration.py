"""The daemon's configuration file and present settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gpupoold.api.schemas_config import ConfigInfo, DiffInfo
from gpupoold.config.budgets import MODEL_CACHE
from gpupoold.config.file import ConfigFile, parsed_file, read_config_file
from gpupoold.config.fitting import Update, fitted, update_of
from gpupoold.config.keys import change_info, config_info
from gpupoold.config.machine import Machine
from gpupoold.config.schema import RunningSettings, Settings
from gpupoold.config.values import Effect
from gpupoold.doctor.machine import find_machine


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
        returns the facts about the machine.

        Raises:
            MachineError: the machine has too little memory for the file's budgets.
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
        return DiffInfo(path=path, changes=[change_info(one) for one in update.changes])

    async def read(self) -> ConfigFile:
        """Read the file again."""
        return await asyncio.to_thread(read_config_file, self._named)

    async def update_of(self, file: ConfigFile) -> Update:
        """Return the effect of a file on the running daemon.

        Raises:
            MachineError: the machine has too little memory for the file's budgets.
        """
        now = await asyncio.to_thread(self._machine, self.settings)
        then = await asyncio.to_thread(self._machine, file.settings)
        return update_of(self.settings, file.settings, now, then)

    def take(self, file: ConfigFile, update: Update) -> None:
        """Apply the part of ``update``, the effect of ``file``, that needs no restart."""
        waiting = {one.key for one in update.changes if one.effect is Effect.RESTART}
        self._written = (file.written - waiting) | (self._written & waiting)
        self._reasons = {key: text for key, text in self._reasons.items() if key in waiting} | {
            key: text for key, text in update.reasons.items() if key not in waiting
        }
        self.path = file.path
        self.budgets = update.fitted.budgets
        self.settings.take(update.fitted.settings)
