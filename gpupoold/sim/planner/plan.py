"""The planner: whether a load fits a box, the number of devices needed, and remedies.

Every number and every suggested change was simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpupoold.errors import UsageError
from gpupoold.latency.models import SwitchModel
from gpupoold.latency.shape import hardware, hardware_profiles
from gpupoold.sim.boxes import Box, SimModel
from gpupoold.sim.planner.run import (
    SPLITTING,
    Attained,
    FixedRoles,
    Forecast,
    LoadedBox,
    NothingToServe,
    OnProgress,
    Runner,
    Setup,
    best_count,
    search_splits,
    try_fixed_roles,
)
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.units import format_duration

MAX_DEVICES = 256
# If doubling the devices closes less than this part of the gap to the target, no number of devices
# will.
_LEAST_GAIN = 0.05
_GROWTHS = (1.1, 1.25, 1.5, 2.0, 3.0)

ModelsOn = Callable[[Box], Mapping[str, SimModel]]
_ROUND = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
_NUM_STEPS = 3
_LOAD_SHARES = (0.9, 0.75, 0.5)
_FASTER_LINK = 2.0

_MAX_NAMED = 3


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

    Raises UsageError if the question is impossible, there are no requests, or no policy can run.
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


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change; ``kind`` is the change's name in JSON, ``text`` the instruction.

    A change has a :class:`~gpupoold.sim.planner.run.Setup`; the planner simulates the setup to find
    out whether the change suffices.
    """

    kind: str
    text: str
    setup: Setup


def chains(
    setup: Setup, worst: Sequence[str], needed: int | None, models_on: ModelsOn | None
) -> Iterator[tuple[PlanChange, ...]]:
    """Yield changes from the cheapest to the most expensive.

    A tuple has the same change in growing amounts, to be tried up to the first sufficient amount.
    ``worst`` names the models below the target; ``needed`` is the least sufficient number of
    devices. ``models_on`` returns the models on another kind of device.
    """
    yield _relaxed(setup, worst, "tbt")
    yield _relaxed(setup, worst, "ttft")
    yield from _moved_off(setup)
    yield tuple(_less_load(setup, share) for share in _LOAD_SHARES)
    if not setup.by_degree:  # the other changes are for equal devices
        yield (_faster_link(setup),)
    if needed == setup.box.num_devices + 1:
        yield (_devices(setup, needed),)
    if not setup.by_degree:
        yield from _faster_gpu(setup, models_on)
    if needed is not None and needed > setup.box.num_devices + 1:
        yield (_devices(setup, needed),)


def next_round(value: float) -> float:
    """Return the next larger of the round values 1, 1.5, 2, 3, 5, 7.5, 10, ..."""
    decade = 10.0 ** math.floor(math.log10(value))
    steps = (round(step * scale, 9) for scale in (decade, 10 * decade) for step in _ROUND)
    return next(step for step in steps if step > value * (1 + 1e-9))


def _relaxed(setup: Setup, worst: Sequence[str], target: str) -> tuple[PlanChange, ...]:
    """Return longer TTFT or TBT targets for the worst models, at the next round values."""
    field = f"{target}_s"
    steps: list[PlanChange] = []
    values = {name: getattr(setup.models[name].targets, field) for name in worst}
    for _ in range(_NUM_STEPS):
        values = {name: next_round(value) for name, value in values.items()}
        relaxed = {
            name: replace(
                setup.models[name],
                targets=replace(setup.models[name].targets, **{field: values[name]}),
            )
            for name in worst
        }
        text = f"{target.upper()} of {_relaxed_text(setup, relaxed, field)}"
        changed = replace(setup, models={**setup.models, **relaxed})
        steps.append(PlanChange(target, text, changed))
    return tuple(steps)


def _relaxed_text(setup: Setup, relaxed: Mapping[str, SimModel], field: str) -> str:
    by_step: dict[tuple[float, float], list[str]] = {}
    for name, model in relaxed.items():
        before = getattr(setup.models[name].targets, field)
        by_step.setdefault((before, getattr(model.targets, field)), []).append(name)
    return ", of ".join(
        f"{names_text(names, len(setup.models))} from {format_duration(before)} to "
        f"{format_duration(after)}"
        for (before, after), names in by_step.items()
    )


def _moved_off(setup: Setup) -> Iterator[tuple[PlanChange, ...]]:
    """Yield the change without the heaviest model, and without the busiest model."""
    if len(setup.models) < 2:
        return
    requests = setup.load.draw(setup.seeds[0])
    counts = {name: sum(request.model == name for request in requests) for name in setup.models}
    heaviest = max(setup.models, key=lambda name: (setup.models[name].weight_bytes, counts[name]))
    busiest = max(counts, key=lambda name: counts[name])
    if counts[heaviest]:
        size = f"{setup.models[heaviest].weight_bytes / 1e9:.3g} GB"
        yield (_without(setup, heaviest, f"the heaviest model, {heaviest} ({size})"),)
    if busiest != heaviest:
        share = counts[busiest] / len(requests)
        what = f"the busiest model, {busiest} ({100 * share:.0f} % of the requests)"
        yield (_without(setup, busiest, what),)


def _without(setup: Setup, name: str, what: str) -> PlanChange:
    models = {other: model for other, model in setup.models.items() if other != name}
    engines = tuple(own for own in setup.host.own_engine_bytes if own[0] != name)
    host = replace(setup.host, own_engine_bytes=engines)
    changed = replace(setup, models=models, load=setup.load.without(name), host=host)
    return PlanChange("move", f"move {what} to another box", changed)


def _less_load(setup: Setup, share: float) -> PlanChange:
    text = f"send only {100 * share:.0f} % of this load here"
    return PlanChange("load", text, replace(setup, load=setup.load.scaled(share)))


def _faster_link(setup: Setup) -> PlanChange:
    now = min(m.latency.switch.bandwidth_bytes_per_s for m in setup.models.values())
    models = {}
    for name, model in setup.models.items():
        link = SwitchModel(_FASTER_LINK * model.latency.switch.bandwidth_bytes_per_s)
        models[name] = replace(model, latency=replace(model.latency, switch=link))
    text = (
        f"a host link {_FASTER_LINK:g} times as fast "
        f"({_FASTER_LINK * now / 1e9:.3g} GB/s instead of {now / 1e9:.3g})"
    )
    return PlanChange("link", text, replace(setup, models=models))


def _devices(setup: Setup, num_devices: int) -> PlanChange:
    changed = setup.on(num_devices)
    more = num_devices - setup.box.num_devices
    text = f"{'one more device' if more == 1 else f'{more} more devices'} ({changed.box.name})"
    return PlanChange("devices", text, changed)


def _faster_gpu(setup: Setup, models_on: ModelsOn | None) -> Iterator[tuple[PlanChange, ...]]:
    """Yield the same number of the next GPU with more memory bandwidth and no less memory."""
    if models_on is None:
        return
    now = hardware(setup.box.gpu)
    better = [
        gpu
        for gpu in hardware_profiles().values()
        if gpu.memory_bandwidth_bytes_per_s > now.memory_bandwidth_bytes_per_s
        and gpu.memory_bytes >= 0.98 * now.memory_bytes
    ]
    for gpu in sorted(better, key=lambda gpu: gpu.memory_bandwidth_bytes_per_s)[:1]:
        box = replace(setup.box, gpu=gpu.name)
        try:
            models = models_on(box)
        except UsageError:  # the latency of a model on that GPU is unknown
            return
        is_scaled = any(model.latency.is_scaled for model in models.values())
        text = f"other devices: {box.name} instead of {setup.box.name}" + (
            " (step times scaled)" if is_scaled else ""
        )
        yield (PlanChange("gpu", text, replace(setup, box=box, models=models)),)


def names_text(names: Sequence[str], num_models: int) -> str:
    """Return ``a, b``; the number and the first two names if more than three; or "all models"."""
    if len(names) == num_models > 1:
        return "all models"
    if len(names) > _MAX_NAMED:
        return f"{len(names)} models ({', '.join(names[:2])}, ...)"
    return ", ".join(names)
