"""Bodies of the admin API about the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from gpupoold.api.schemas import Body

Origin = Literal["file", "default", "machine"]
EffectName = Literal["live", "loads", "restart"]


class SettingInfo(BaseModel):
    """A key, its value as written in a file, and the value's origin.

    ``value`` is None for a key that is not set or hidden. ``reason`` has the arithmetic of a value
    that was worked out from the machine. ``effect`` says when a change applies:
    ``live`` at once, ``loads`` for models loaded later, ``restart`` after a restart of gpupoold.
    """

    key: str
    value: Any
    is_hidden: bool
    origin: Origin
    effect: EffectName
    reason: str = ""


class ConfigInfo(BaseModel):
    """A daemon's configuration; ``path`` is None without a file."""

    path: str | None
    settings: list[SettingInfo]


class ChangeInfo(BaseModel):
    """A changed key; ``before`` and ``after`` are None if not set or hidden."""

    key: str
    before: Any
    after: Any
    is_hidden: bool
    effect: EffectName


class DiffInfo(BaseModel):
    """The changes that a file would make."""

    path: str | None
    changes: list[ChangeInfo]


class DiffRequest(Body):
    """The file to compare: its ``text``, or None for the daemon's own file.

    ``name`` stands for the file in errors.
    """

    text: str | None = None
    name: str = ""


class ReloadInfo(BaseModel):
    """The changes of a reload: those in effect, and those that wait for a restart."""

    path: str | None
    changed: list[ChangeInfo]
    waiting: list[ChangeInfo]
