"""The configuration as bodies of the admin API. Pure conversions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from gpupoold.api.schemas_config import ChangeInfo, ConfigInfo, Origin, SettingInfo
from gpupoold.config.keys import KeyChange, settings_of
from gpupoold.config.schema import Settings


def config_info(
    settings: Settings,
    path: Path | None,
    written: Collection[str],
    reasons: Mapping[str, str],
) -> ConfigInfo:
    """Return all keys with values; the ``written`` keys come from the file.

    ``reasons`` has the arithmetic of values worked out from the machine.
    """
    infos = [
        SettingInfo(
            key=one.key,
            value=one.spelled,
            is_hidden=one.is_hidden,
            origin=_origin(one.key, written, reasons),
            reason=reasons.get(one.key, ""),
            effect=one.effect.value,
        )
        for one in settings_of(settings)
    ]
    return ConfigInfo(path=None if path is None else str(path), settings=infos)


def _origin(key: str, written: Collection[str], reasons: Mapping[str, str]) -> Origin:
    if key in reasons:
        return "machine"
    return "file" if key in written else "default"


def change_info(change: KeyChange) -> ChangeInfo:
    before, after = change.before, change.after
    return ChangeInfo(
        key=change.key,
        before=before.spelled if before is not None else None,
        after=after.spelled if after is not None else None,
        is_hidden=any(side is not None and side.is_hidden for side in (before, after)),
        effect=change.effect.value,
    )
