"""The planner: whether a load fits a box, the number of devices needed, and remedies.

Every number and every suggested change was simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpupoold.errors import UsageError
from gpupoold.sim.boxes import Box
from gpupoold.sim.model import SimModel
from gpupoold.sim.planner.changes import PlanChange, chains
from gpupoold.sim.planner.roles import FixedRoles, best_count, search_splits, try_fixed_roles
from gpupoold.sim.planner.run import (
    SPLITTING,
    Attained,
    Forecast,
    LoadedBox,
    NothingToServe,
    OnProgress,
    Runner,
    Setup,
)
from gpupoold.sim.policies import PolicyOptions, make_policy

MAX_DEVICES = 256
# If doubling the devices closes less than this part of the gap to the target, no number of devices
# will.
_LEAST_GAIN = 0.05
_GROWTHS = (1.1, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class PlanQuestion(LoadedBox):
    """The question; ``models`` are the models on the GPU of ``box``.

    ``by_degree`` has the models that groups of each size can run, empty if all devices are equal.
    ``target`` is the wanted attainment. ``models_on`` returns the models on another kind of device
    (UsageError: unknown there); without the function other kinds are not tried. A random load runs
    once per seed, a recorded load once.
    """

    models: Mapping[str, SimModel]
    target: float
    policies: tuple[str, ...] = ("gpupool",)
    seeds: tuple[int, ...] = (0, 1)
    models_on: Callable[[Box], Mapping[str, SimModel]] | None = None
    by_degree: Mapping[int, Mapping[str, SimModel]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A policy on the present box; ``num_prefill`` is the best number of prefill devices."""

    policy: str
    attained: Attained
    num_prefill: int | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """A change, or a number of devices, and the result."""

    kind: str
    text: str
    num_devices: int
    attained: Attained


@dataclass(frozen=True, slots=True)
class Plan:
    """The answers, for the best of the given policies.

    ``needed`` is the least number of devices that reaches the target, None if no number up to the
    largest of ``counts`` suffices. ``growth`` is the largest tried multiple of the load that fits
    (1 if no multiple fits), and ``growth_limit`` the next multiple, which does not fit (None if all
    fit); both are None if the present load does not fit. ``changes`` are all tried changes,
    cheapest first. ``fixed_roles`` is None if no fixed roles were tried.
    """

    fits: bool
    attained: Attained
    forecast: Forecast
    policies: tuple[PolicyResult, ...]
    needed: int | None
    counts: tuple[Tried, ...]
    growth: float | None
    growth_limit: float | None
    changes: tuple[Tried, ...]
    num_runs: int
    fixed_roles: FixedRoles | None = None


def check_question(target: float, policies: Sequence[str]) -> None:
    """Raise UsageError for an invalid target or policy."""
    if not 0 < target <= 1:
        hint = "write 0.99 for 99 % of the tokens"
        raise UsageError(f"target {target:g}: must be above 0 and at most 1", hint)
    for policy in policies:
        make_policy(policy, PolicyOptions())


def make_plan(question: PlanQuestion, on_progress: OnProgress | None = None) -> Plan:
    """Simulate until all questions are answered.

    Raises:
        UsageError: the question is impossible, there are no requests, or no policy can run.
    """
    check_question(question.target, question.policies)
    return _Planner(question, on_progress).plan()


class _Planner:
    def __init__(self, question: PlanQuestion, on_progress: OnProgress | None) -> None:
        self._question = question
        self._target = question.target
        self._runner = Runner(on_progress)
        self._counts: dict[int, Tried] = {}

    def plan(self) -> Plan:
        """Choose the best policy, then answer all other questions for that policy."""
        results = [self._policy_result(name) for name in dict.fromkeys(self._question.policies)]
        results.sort(key=lambda result: -result.attained.worst)
        best = results[0]
        if best.attained.overall is None:
            problem = f"{best.policy} cannot run here: {best.attained.refused}"
            raise UsageError(problem, "choose another --policy, or more devices")
        base = self._setup(best.policy, best.num_prefill)
        shown = self._runner.forecast(base)
        fits = best.attained.reaches(self._target)
        self._counts[base.box.num_devices] = _tried_devices(base, best.attained)
        roles = try_fixed_roles(self._runner, base, best.attained)
        needed = self._needed(base, fits)
        growth, growth_limit = self._growth(base) if fits else (None, None)
        changes = () if fits else (*_fixing(base, roles), *self._changes(base, shown, needed))
        return Plan(
            fits=fits,
            attained=best.attained,
            forecast=shown,
            policies=tuple(results),
            needed=needed,
            counts=tuple(self._counts[number] for number in sorted(self._counts)),
            growth=growth,
            growth_limit=growth_limit,
            changes=changes,
            num_runs=self._runner.num_runs,
            fixed_roles=roles,
        )

    def _setup(self, policy: str, num_prefill: int | None = None) -> Setup:
        asked = self._question
        return Setup(
            asked.box,
            asked.load,
            asked.models,
            asked.seeds,
            policy,
            num_prefill,
            asked.by_degree,
            max_lens=asked.max_lens,
            host=asked.host,
        )

    def _policy_result(self, policy: str) -> PolicyResult:
        setup = self._setup(policy)
        if policy in SPLITTING and setup.box.num_devices > 1:
            return self._best_split(setup)
        return PolicyResult(policy, self._runner.attained(setup, f"policy {policy}"))

    def _best_split(self, setup: Setup) -> PolicyResult:
        """Return the best split into prefill and decode devices.

        Splits are compared by one run each; the best split runs with all seeds.
        """
        quick = replace(setup, seeds=setup.seeds[:1])
        num_devices = setup.box.num_devices

        def attained(count: int) -> Attained:
            what = f"policy {setup.policy}, {count} of {num_devices} devices prefill"
            return self._runner.attained(replace(quick, num_prefill=count), what)

        best = best_count(search_splits(num_devices, attained))
        full = replace(setup, num_prefill=best)
        return PolicyResult(setup.policy, self._runner.attained(full, setup.policy), best)

    def _needed(self, base: Setup, fits: bool) -> int | None:
        """Return the least number of devices, found by doubling and then bisection."""
        enough = base.box.num_devices
        too_few = 0
        while not fits:
            too_few = enough
            if too_few >= MAX_DEVICES or self._is_overloaded(base, too_few):
                return None
            enough = min(2 * too_few, MAX_DEVICES)
            fits = self._reaches(base, enough)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._reaches(base, middle):
                enough = middle
            else:
                too_few = middle
        return enough

    def _is_overloaded(self, base: Setup, num_devices: int) -> bool:
        """Return whether more devices are useless.

        True if the last doubling gained almost nothing although each model had a device before.
        """
        before = self._counts.get(num_devices // 2)
        if before is None or num_devices // 2 < len(base.models):
            return False
        gap = self._target - before.attained.worst
        gained = self._counts[num_devices].attained.worst - before.attained.worst
        return gained < _LEAST_GAIN * gap

    def _reaches(self, base: Setup, num_devices: int) -> bool:
        if num_devices not in self._counts:
            setup = base.on(num_devices)
            attained = self._runner.attained(setup, setup.box.name)
            self._counts[num_devices] = _tried_devices(setup, attained)
        return self._counts[num_devices].attained.reaches(self._target)

    def _growth(self, base: Setup) -> tuple[float, float | None]:
        """Return the largest multiple of the load that fits, and the next tried multiple."""
        reached = 1.0
        for factor in _GROWTHS:
            setup = replace(base, load=base.load.scaled(factor))
            attained = self._runner.attained(setup, f"{factor:g} times the load")
            if not attained.reaches(self._target):
                return reached, factor
            reached = factor
        return reached, None

    def _changes(self, base: Setup, shown: Forecast, needed: int | None) -> tuple[Tried, ...]:
        # Every model may reach the target over all runs together although the worst run missed the
        # target; then the worst model is relaxed.
        worst = models_below(shown, self._target) or models_below(shown, math.inf)[:1]
        tried: list[Tried] = []
        for chain in chains(base, worst, needed, self._question.models_on):
            for change in chain:
                try:
                    tried.append(self._try(change))
                except NothingToServe:  # the change leaves no requests, so it is no advice
                    break
                if tried[-1].attained.reaches(self._target):
                    break
        return tuple(tried)

    def _try(self, change: PlanChange) -> Tried:
        num_devices = change.setup.box.num_devices
        known = self._counts.get(num_devices) if change.kind == "devices" else None
        attained = known.attained if known else self._runner.attained(change.setup, change.text)
        return Tried(change.kind, change.text, num_devices, attained)


def models_below(forecast: Forecast, target: float) -> tuple[str, ...]:
    """Return the models below the target, the worst first."""
    attained = {name: summary.attainment for name, summary in forecast.models.items()}
    below = [(share, name) for name, share in attained.items() if share is not None]
    return tuple(name for share, name in sorted(below) if share < target)


def _fixing(base: Setup, roles: FixedRoles | None) -> tuple[Tried, ...]:
    """Return the change to the best fixed roles, if better in the first draw."""
    if roles is None or roles.best is None:
        return ()
    text = f"fixed roles: {roles.best.text}"
    return (Tried("roles", text, base.box.num_devices, roles.best.attained),)


def _tried_devices(setup: Setup, attained: Attained) -> Tried:
    return Tried("devices", setup.box.name, setup.box.num_devices, attained)
