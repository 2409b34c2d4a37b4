"""The file a daemon was started with, and the settings it runs with."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpupoold.admin.models_config import ChangeInfo, ConfigInfo, DiffInfo, SettingInfo
from gpupoold.config import RunningSettings, Settings
from gpupoold.config_file import ConfigFile, parsed_file, read_config_file
from gpupoold.config_keys import Change, changes_between, settings_of


class Configuration:
    """What the daemon's configuration is, and what a file would make of it; one per daemon."""

    def __init__(self, file: ConfigFile, named: Path | None = None) -> None:
        """``named``: the file that was asked for; None: whichever is found, see
        :func:`gpupoold.config.chosen_path`."""
        self._named = named
        self._path = file.path
        self._written = file.written
        self.settings = RunningSettings.of(file.settings)

    def info(self) -> ConfigInfo:
        """All keys, with their values now."""
        settings = [
            SettingInfo(
                key=one.key,
                value=one.spelled,
                is_hidden=one.is_hidden,
                origin="file" if one.key in self._written else "default",
                effect=one.effect.value,
            )
            for one in settings_of(self.settings)
        ]
        return ConfigInfo(path=_shown(self._path), settings=settings)

    async def diff(self, text: str | None = None, name: str = "") -> DiffInfo:
        """What the ``text`` of a file called ``name`` would change; without one, the file.

        Raises:
            ConfigError: something is wrong in it.
        """
        file = await self.read() if text is None else parsed_file(text, Path(name))
        changes = changes_between(self.settings, file.settings)
        return DiffInfo(path=_shown(file.path), changes=[change_info(one) for one in changes])

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
        self._path = file.path
        self.settings.take(settings)


def change_info(change: Change) -> ChangeInfo:
    """A change as the admin API tells it."""
    before, after = change.before, change.after
    return ChangeInfo(
        key=change.key,
        before=before.spelled if before is not None else None,
        after=after.spelled if after is not None else None,
        is_hidden=any(side is not None and side.is_hidden for side in (before, after)),
        effect=change.effect.value,
    )


def _shown(path: Path | None) -> str | None:
    return None if path is None else str(path)
