"""Roles of a box's devices in the form that users write."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

from gpupoold.domain import Role
from gpupoold.errors import UsageError

AUTO: Literal["auto"] = "auto"
_PART = re.compile(r"(?:(\d+)\s*x\s*)?([a-z]+)")
_MAX_DEVICES = 4096


def parse_roles(text: str) -> tuple[Role, ...] | Literal["auto"]:
    """Parse ``auto``, ``mixed``, or ``prefill,decode`` and ``2xprefill,6xdecode``."""
    if text.strip() == AUTO:
        return AUTO
    roles: list[Role] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or match[2] not in list(Role):
            raise UsageError(
                f"{part.strip()!r} is not a role",
                f"write auto, or roles such as 2xprefill,6xdecode; roles are {', '.join(Role)}",
            )
        count = int(match[1] or 1)
        if not 0 < count <= _MAX_DEVICES:
            raise UsageError(f"{part.strip()!r}: from 1 to {_MAX_DEVICES} devices can have a role")
        roles += [Role(match[2])] * count
    return tuple(roles)


def roles_text(roles: Sequence[Role] | None) -> str:
    """Return the form that ``parse_roles`` reads; None is ``auto``."""
    if roles is None:
        return AUTO
    runs = [(role, len(list(run))) for role, run in itertools.groupby(roles)]
    return ",".join(f"{count}x{role}" if count > 1 else str(role) for role, count in runs)
