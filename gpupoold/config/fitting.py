"""Settings with the budgets that were worked out for a machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpupoold.api.schemas import ChangeInfo
from gpupoold.config.budgets import Budgets, Wishes, work_out
from gpupoold.config.keys import changes_between, with_changes
from gpupoold.config.machine import Machine, check_groups
from gpupoold.config.schema import Settings
from gpupoold.errors import SettingError


@dataclass(frozen=True, slots=True)
class Fitted:
    """Settings in which every budget has a value, and the budgets with their arithmetic."""

    settings: Settings
    budgets: Budgets


@dataclass(frozen=True, slots=True)
class Update:
    """The effect of a changed file on a running daemon.

    ``fitted`` applies at once; ``changes`` also has the changes that wait for a restart.
    ``reasons`` has the arithmetic of the file's budgets, by key.
    """

    fitted: Fitted
    changes: list[ChangeInfo]
    reasons: dict[str, str]


def fitted(settings: Settings, machine: Machine) -> Fitted:
    """Return the settings with all budgets.

    Raises SettingError: a group has unlike GPUs, or one that is not there; or the machine has too
    little memory for budgets that the settings have.
    """
    check_groups(machine.devices)
    memory, limits = settings.memory, settings.limits
    wishes = Wishes(
        memory.model_cache_or_auto,
        memory.kv_host_or_auto,
        memory.reserve_or_auto,
        limits.max_bytes_in_flight_or_auto,
        settings.server.frontends,
        memory.engines_bytes,
    )
    budgets = work_out(wishes, machine)
    return Fitted(_with_budgets(settings, budgets), budgets)


def update_of(now: Settings, file: Settings, machine_now: Machine, machine_then: Machine) -> Update:
    """Return the effect of ``file`` on a daemon that runs with ``now``.

    The machines have the facts for the devices of ``now`` and of ``file``. Budgets that apply at
    once are worked out beside the budgets in force, because a changed ``memory.kv_host`` waits for
    a restart. Raises SettingError: the machine has too little memory for the file, or for the
    budgets in force together with the new ones.
    """
    wanted = fitted(file, machine_then)
    in_force = with_changes(now, wanted.settings, changes_between(now, wanted.settings))
    try:
        live = fitted(_live_wishes(in_force, wanted.settings, file), machine_now)
    except SettingError as error:
        hint = f"{error.hint}; or restart gpupoold, which applies all keys together"
        raise SettingError(error.key, error.what, hint) from None
    target = _with_live(wanted.settings, live.settings)
    changes = changes_between(now, target)
    return Update(
        Fitted(with_changes(now, target, changes), live.budgets),
        changes,
        wanted.budgets.reasons | live.budgets.reasons,
    )


def _with_budgets(settings: Settings, budgets: Budgets) -> Settings:
    memory = {
        "model_cache_or_auto": budgets.model_cache_bytes,
        "kv_host_or_auto": budgets.kv_host_bytes,
        "reserve_or_auto": budgets.reserve_bytes,
    }
    return _replaced(settings, memory, {"max_bytes_in_flight_or_auto": budgets.bytes_in_flight})


def _live_wishes(in_force: Settings, wanted: Settings, file: Settings) -> Settings:
    """Return the settings in force, with the file's wishes for budgets that apply at once.

    An automatic ``memory.kv_host`` that does not change stays automatic, so that the same file
    gives the same model cache.
    """
    settings = _with_live(in_force, file)
    if in_force.memory.kv_host_or_auto != wanted.memory.kv_host_or_auto:
        return settings
    return _replaced(settings, {"kv_host_or_auto": file.memory.kv_host_or_auto}, {})


def _with_live(settings: Settings, other: Settings) -> Settings:
    """Return ``settings`` with the other's budgets that apply at once."""
    memory = {"model_cache_or_auto": other.memory.model_cache_or_auto}
    in_flight = other.limits.max_bytes_in_flight_or_auto
    return _replaced(settings, memory, {"max_bytes_in_flight_or_auto": in_flight})


def _replaced(settings: Settings, memory: dict[str, Any], limits: dict[str, Any]) -> Settings:
    return settings.model_copy(
        update={
            "memory": settings.memory.model_copy(update=memory),
            "limits": settings.limits.model_copy(update=limits),
        }
    )
