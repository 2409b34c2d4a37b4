"""The file a daemon was started with, and the settings it runs with."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from gpupoold.api.schemas_config import ConfigInfo, DiffInfo
from gpupoold.config.file import ConfigFile, parsed_file, read_config_file
from gpupoold.config.keys import changes_between
from gpupoold.config.schema import RunningSettings, Settings
from gpupoold.config.view import change_info, config_info

_logger = logging.getLogger(__name__)


class Configuration:
    """What the daemon's configuration is, and what a file would make of it; one per daemon.

    ``path`` is that of the file it was read from last, None where there was none.
    """

    def __init__(self, file: ConfigFile, named: Path | None = None) -> None:
        """``named``: the file that was asked for; None: whichever is found, see
        :func:`gpupoold.config.schema.chosen_path`."""
        self._named = named
        self._written = file.written
        self.path = file.path
        self.settings = RunningSettings.of(file.settings)
        _warn_of_old_names(file)

    def info(self) -> ConfigInfo:
        """All keys, with their values now."""
        return config_info(self.settings, self.path, self._written)

    async def diff(self, text: str | None = None, name: str = "") -> DiffInfo:
        """What the ``text`` of a file called ``name`` would change; without one, the file.

        Raises:
            ConfigError: something is wrong in it.
        """
        file = await self.read() if text is None else parsed_file(text, Path(name))
        changes = changes_between(self.settings, file.settings)
        path = None if file.path is None else str(file.path)
        return DiffInfo(path=path, changes=[change_info(one) for one in changes])

    async def read(self) -> ConfigFile:
        """The file as it is now.

        Raises:
            ConfigError: something is wrong in it.
        """
        return await asyncio.to_thread(read_config_file, self._named)

    def take(self, file: ConfigFile, settings: Settings) -> None:
        """Run with these settings: those of ``file``, as far as that is possible now."""
        waiting = {one.key for one in changes_between(settings, file.settings)}
        self._written = (file.written - waiting) | (self._written & waiting)
        self.path = file.path
        self.settings.take(settings)
        _warn_of_old_names(file)


def _warn_of_old_names(file: ConfigFile) -> None:
    for sentence in file.renamed:
        _logger.warning("%s: %s", file.path, sentence)
