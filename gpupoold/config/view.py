"""The configuration as bodies of the admin API. Pure conversions."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpupoold.api.schemas_config import ChangeInfo, ConfigInfo, SettingInfo
from gpupoold.config.keys import KeyChange, settings_of
from gpupoold.config.schema import Settings


def config_info(settings: Settings, path: Path | None, written: Collection[str]) -> ConfigInfo:
    """Return all keys with values; the ``written`` keys come from the file."""
    infos = [
        SettingInfo(
            key=one.key,
            value=one.spelled,
            is_hidden=one.is_hidden,
            origin="file" if one.key in written else "default",
            effect=one.effect.value,
        )
        for one in settings_of(settings)
    ]
    return ConfigInfo(path=None if path is None else str(path), settings=infos)


def change_info(change: KeyChange) -> ChangeInfo:
    before, after = change.before, change.after
    return ChangeInfo(
        key=change.key,
        before=before.spelled if before is not None else None,
        after=after.spelled if after is not None else None,
        is_hidden=any(side is not None and side.is_hidden for side in (before, after)),
        effect=change.effect.value,
    )
