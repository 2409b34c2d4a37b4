"""Fixed roles of a box's devices, compared with the roles that the policy chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpupoold.sim.planner.run import CHOOSES_ROLES, Attained, Runner, Setup
from gpupoold.sim.roles_text import roles_text

_EXHAUSTIVE_SPLITS = 8


@dataclass(frozen=True, slots=True)
class RolesTried:
    """Fixed roles and the result.

    ``num_prefill`` devices prefill and the others decode; with 0 all devices do both.
    """

    num_prefill: int
    text: str
    attained: Attained


@dataclass(frozen=True, slots=True)
class FixedRoles:
    """All roles tried, each in the first draw, and the best in all draws.

    ``chosen`` is the result of the policy's own roles. ``best`` is None if no fixed roles were
    better in the first draw.
    """

    chosen: Attained
    tried: tuple[RolesTried, ...]
    best: RolesTried | None = None

    @property
    def gain(self) -> float | None:
        """Increase of the share of tokens in time, of all draws together."""
        if self.best is None or self.best.attained.overall is None or self.chosen.overall is None:
            return None
        return self.best.attained.overall - self.chosen.overall

    @property
    def is_better(self) -> bool:
        """True if the best fixed roles are better in every draw."""
        if self.best is None:
            return False
        pairs = zip(self.best.attained.by_run, self.chosen.by_run, strict=True)
        return all(fixed > chosen for fixed, chosen in pairs)

    @property
    def confidence(self) -> float | None:
        """One-sided confidence that the best fixed roles are better in most draws.

        As :meth:`Attained.confidence`, without the first draw, which chose the roles. None for
        fewer than three draws, or roles that were not better in every draw.
        """
        num_others = len(self.chosen.by_run) - 1
        return 1 - 0.5**num_others if num_others > 1 and self.is_better else None


def search_splits(num_devices: int, attained: Callable[[int], Attained]) -> dict[int, Attained]:
    """Return the results of splits by their number of prefill devices.

    A small box is searched completely, a large box by a coarse grid refined around the best split.
    """
    last = num_devices - 1
    step = -(-last // _EXHAUSTIVE_SPLITS)
    tried: dict[int, Attained] = {}
    candidates = list(range(step, last + 1, step))
    while candidates:
        for count in candidates:
            tried[count] = attained(count)
        best = best_count(tried)
        step //= 2
        near = (best - step, best + step) if step else ()
        candidates = [count for count in near if 1 <= count <= last and count not in tried]
    return tried


def best_count(tried: dict[int, Attained]) -> int:
    """Return the number of prefill devices with the best worst run."""
    return max(tried, key=lambda count: tried[count].worst)


def try_fixed_roles(runner: Runner, setup: Setup, chosen: Attained) -> FixedRoles | None:
    """Run fixed roles beside the result ``chosen`` of the policy's own roles.

    The roles are no split, and the splits of :func:`search_splits`. None if the policy does not
    choose roles, a single device leaves no choice, or all tokens are in time.
    """
    num_devices = setup.box.num_devices
    if setup.policy not in CHOOSES_ROLES or num_devices < 2 or chosen.worst == 1.0:
        return None

    def text(count: int) -> str:
        return roles_text(replace(setup, num_prefill=count).roles)

    def attained(count: int) -> Attained:
        quick = replace(setup, num_prefill=count, seeds=setup.seeds[:1])
        return runner.attained(quick, f"fixed roles {text(count)}")

    results = {0: attained(0)} | search_splits(num_devices, attained)
    tried = tuple(RolesTried(count, text(count), one) for count, one in sorted(results.items()))
    best = best_count(results)
    if results[best].by_run[0] <= chosen.by_run[0]:
        return FixedRoles(chosen, tried)
    full = runner.attained(replace(setup, num_prefill=best), f"fixed roles {text(best)}")
    return FixedRoles(chosen, tried, RolesTried(best, text(best), full))
