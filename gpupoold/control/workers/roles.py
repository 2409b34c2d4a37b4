"""Roles of workers across restarts. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

from gpupoold.config.schema import Settings
from gpupoold.domain import Role


class Roles:
    """Roles by worker: set by an operator or in the configuration, else chosen by the policy."""

    def __init__(self, fixed: Sequence[Role | None] = ()) -> None:
        """``fixed`` are the roles of workers 0, 1, ...; None leaves the choice to the policy."""
        self._fixed = dict(enumerate(fixed))
        self._chosen: dict[int, Role] = {}

    def of(self, number: int) -> tuple[Role, bool]:
        """Return a worker's role, and whether an operator fixed the role."""
        fixed = self._fixed.get(number)
        return fixed or self._chosen.get(number, Role.MIXED), fixed is not None

    def fix(self, number: int, role: Role | None) -> None:
        """Fix a worker's role; None leaves the choice to the policy."""
        if role is None:
            self._chosen[number], _ = self.of(number)  # until the policy changes the role
        self._fixed[number] = role

    def chosen(self, number: int, role: Role) -> None:
        self._chosen[number] = role


def configured_roles(settings: Settings) -> list[Role | None]:
    """Return the roles of the devices by number; None leaves the choice to the policy."""
    names = settings.scheduling.roles
    if names == "auto":
        return [None] * len(settings.devices)
    return [None if name == "auto" else Role(name) for name in names]
