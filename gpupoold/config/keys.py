"""The values of a configuration by key, and changes between two configurations, also as bodies of
the admin API. Pure.

Keys are dotted and spelled as in the file: ``server.port``, ``device[0].memory``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpupoold.api.schemas import ChangeInfo, ConfigInfo, Origin, SettingInfo
from gpupoold.config.schema import Settings
from gpupoold.config.values import Effect, Section, effect_of

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with the parsed ``value`` and the value ``spelled`` as in a file.

    ``value`` and ``spelled`` are None for a key that is not set.
    """

    key: str
    value: object
    spelled: object
    effect: Effect


def settings_of(settings: Settings) -> list[Setting]:
    spelled = settings.model_dump(mode="json", by_alias=True)
    found: list[Setting] = []
    for name, field in type(settings).model_fields.items():
        section, shown = getattr(settings, name), spelled[field.alias or name]
        if isinstance(section, Section):
            found += _of_section(field.alias or name, section, shown)
        else:
            for index, (element, as_written) in enumerate(zip(section, shown, strict=True)):
                found += _of_section(f"{field.alias or name}[{index}]", element, as_written)
    return found


def changes_between(now: Settings, wanted: Settings) -> list[ChangeInfo]:
    """Return the keys with different values, in the order of ``now``.

    Roles belong to devices by position. If the devices differ too, new roles need a restart, as new
    devices do.
    """
    before, after = _by_key(now), _by_key(wanted)
    keys = [*before, *(key for key in after if key not in before)]
    differing = [key for key in keys if before.get(key) != after.get(key)]
    if any(key.startswith("device[") for key in differing):
        for side in (before, after):
            roles = side["scheduling.roles"]
            side["scheduling.roles"] = replace(roles, effect=Effect.RESTART)
    return [
        ChangeInfo(
            key=key,
            before=before[key].spelled if key in before else None,
            after=after[key].spelled if key in after else None,
            effect=(after.get(key) or before[key]).effect.value,
        )
        for key in differing
    ]


def with_changes(now: Settings, wanted: Settings, changes: list[ChangeInfo]) -> Settings:
    """Return ``now`` with the values of ``wanted`` for changes that need no restart."""
    keys = {change.key for change in changes if change.effect != "restart"}
    updated = {}
    for name, field in type(now).model_fields.items():
        section = getattr(now, name)
        if isinstance(section, Section):
            section = _updated(section, getattr(wanted, name), field.alias or name, keys)
        updated[name] = section
    return now.model_copy(update=updated)


def config_info(
    settings: Settings, path: Path | None, written: Collection[str], reasons: Mapping[str, str]
) -> ConfigInfo:
    """Return all keys with values; the ``written`` keys come from the file.

    ``reasons`` has the arithmetic of values worked out from the machine.
    """
    infos = [
        SettingInfo(
            key=setting.key,
            value=setting.spelled,
            origin=_origin(setting.key, written, reasons),
            reason=reasons.get(setting.key, ""),
            effect=setting.effect.value,
        )
        for setting in settings_of(settings)
    ]
    return ConfigInfo(path=None if path is None else str(path), settings=infos)


def _updated(section: S, wanted: S, name: str, keys: set[str]) -> S:
    fields = type(section).model_fields.items()
    new = {
        field_name: getattr(wanted, field_name)
        for field_name, field in fields
        if f"{name}.{field.alias or field_name}" in keys
    }
    return section.model_copy(update=new)


def _of_section(name: str, section: Section, spelled: Mapping[str, object]) -> Iterator[Setting]:
    for field_name, field in type(section).model_fields.items():
        key = field.alias or field_name
        value, effect = getattr(section, field_name), effect_of(field, section)
        yield Setting(f"{name}.{key}", value, spelled[key], effect)


def _by_key(settings: Settings) -> dict[str, Setting]:
    return {setting.key: setting for setting in settings_of(settings)}


def _origin(key: str, written: Collection[str], reasons: Mapping[str, str]) -> Origin:
    if key in reasons:
        return "machine"
    return "file" if key in written else "default"
