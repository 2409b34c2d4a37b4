"""The daemon's configuration file and present settings."""

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
    """The configuration of a running daemon, and comparisons with files; one per daemon.

    ``path`` is the path of the file read last, None without a file.
    """

    def __init__(self, file: ConfigFile, named: Path | None = None) -> None:
        """Start with ``file``; ``named`` is the path on the command line.

        ``named`` None means the file of :func:`gpupoold.config.schema.chosen_path`.
        """
        self._named = named
        self._written = file.written
        self.path = file.path
        self.settings = RunningSettings.of(file.settings)
        _warn_of_old_names(file)

    def info(self) -> ConfigInfo:
        """Return all keys with their present values."""
        return config_info(self.settings, self.path, self._written)

    async def diff(self, text: str | None = None, name: str = "") -> DiffInfo:
        """Return the changes that a file would make: ``text`` called ``name``, or the daemon's
        file.

        Raises:
            ConfigError: the file has an error.
        """
        file = await self.read() if text is None else parsed_file(text, Path(name))
        changes = changes_between(self.settings, file.settings)
        path = None if file.path is None else str(file.path)
        return DiffInfo(path=path, changes=[change_info(one) for one in changes])

    async def read(self) -> ConfigFile:
        """Read the file again.

        Raises:
            ConfigError: the file has an error.
        """
        return await asyncio.to_thread(read_config_file, self._named)

    def take(self, file: ConfigFile, settings: Settings) -> None:
        """Apply ``settings``, the settings of ``file`` that a running daemon can apply."""
        waiting = {one.key for one in changes_between(settings, file.settings)}
        self._written = (file.written - waiting) | (self._written & waiting)
        self.path = file.path
        self.settings.take(settings)
        _warn_of_old_names(file)


def _warn_of_old_names(file: ConfigFile) -> None:
    for sentence in file.renamed:
        _logger.warning("%s: %s", file.path, sentence)
