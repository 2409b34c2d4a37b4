"""Bodies of the admin API about the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from gpupoold.api.schemas import Body

EffectName = Literal["live", "loads", "restart"]


class SettingInfo(BaseModel):
    """A key, its value as the file spells it, and where that comes from.

    ``value`` is None for a key that is not set, and for one that is hidden. ``effect`` says
    when a change is heeded: ``live`` at once, ``loads`` by models loaded from then on,
    ``restart`` when gpupoold is started again.
    """

    key: str
    value: Any
    is_hidden: bool
    origin: Literal["file", "default"]
    effect: EffectName


class ConfigInfo(BaseModel):
    """What a daemon runs with. ``path`` is None when there is no file."""

    path: str | None
    settings: list[SettingInfo]


class ChangeInfo(BaseModel):
    """A key that another file changes; ``before`` and ``after`` are None where it is not set,
    and where it is hidden."""

    key: str
    before: Any
    after: Any
    is_hidden: bool
    effect: EffectName


class DiffInfo(BaseModel):
    """What a daemon would do differently with a file."""

    path: str | None
    changes: list[ChangeInfo]


class DiffRequest(Body):
    """The file to compare with: its ``text``, which is the daemon's own file if it is None.

    ``name`` is what errors call it.
    """

    text: str | None = None
    name: str = ""


class ReloadInfo(BaseModel):
    """What reading the file again has changed, and what of it waits for a restart."""

    path: str | None
    changed: list[ChangeInfo]
    waiting: list[ChangeInfo]
