"""Runs of a planned box: the same simulator as ``gpupool simulate``, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpupoold.domain import Role
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import Box, SimModel
from gpupoold.sim.device import BoxDevice, on_nodes
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.host import NO_WISHES, HostWishes, engine_costs, host_memory
from gpupoold.sim.metrics import Summary, count_tokens, summarise
from gpupoold.sim.planner.load import Admitted, PlanLoad, admit
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.scenario import end_of_run_s, roles_text
from gpupoold.units import format_duration

# Policies that split devices into prefill and decode.
SPLITTING = frozenset({"aegaeon"})
# Policies that choose roles by arrivals, unless the devices have fixed roles.
CHOOSES_ROLES = frozenset({"gpupool"})
# Too many models for ``static``, and a single device for a split, are results, not usage errors.
_MAY_REFUSE = frozenset({"static"}) | SPLITTING

_EXHAUSTIVE_SPLITS = 8


@dataclass(frozen=True, slots=True)
class LoadedBox:
    """A box with a load.

    ``max_lens`` bounds prompt and answer together, in tokens, as the memory beside the weights
    does. ``host`` has budgets of host memory other than the daemon's defaults.
    """

    box: Box
    load: PlanLoad
    max_lens: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    host: HostWishes = field(default=NO_WISHES, kw_only=True)


@dataclass(frozen=True, slots=True)
class Setup(LoadedBox):
    """All inputs of one forecast.

    ``models`` are the models on the box's GPU. ``num_prefill`` devices prefill and the others
    decode, with 0 all devices do both, and with None the policy chooses. ``by_degree`` has the
    models that groups of each size can run, empty if all devices are equal.
    """

    models: Mapping[str, SimModel]
    seeds: tuple[int, ...]
    policy: str = "gpupool"
    num_prefill: int | None = None
    by_degree: Mapping[int, Mapping[str, SimModel]] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[Role, ...] | None:
        """Fixed roles of the devices; None if the policy decides."""
        if self.policy not in CHOOSES_ROLES or self.num_prefill is None:
            return None
        num_devices, num_prefill = self.box.num_devices, self.num_prefill
        if num_prefill == 0:
            return (Role.MIXED,) * num_devices
        return (Role.PREFILL,) * num_prefill + (Role.DECODE,) * (num_devices - num_prefill)

    def devices(self) -> list[BoxDevice]:
        """Return the devices of the box: groups of equal or of unlike sizes.

        The models' targets are those of ``models``, which may have been changed.
        """
        host = host_memory(self.box, self.host)
        if not self.by_degree:
            kv_host_bytes = self.box.tensor_parallel_size * host.kv_bytes_per_gpu
            device = BoxDevice(self.box.device_bytes, kv_host_bytes=kv_host_bytes)
            return on_nodes([device] * self.box.num_devices, self.models, self.host.far_share)
        kinds = {
            degree: BoxDevice(
                self.box.bytes_of(degree),
                {
                    name: replace(model, targets=self.models[name].targets)
                    for name, model in models.items()
                    if name in self.models
                },
                f"{degree} GPUs",
                kv_host_bytes=degree * host.kv_bytes_per_gpu,
            )
            for degree, models in self.by_degree.items()
        }
        devices = [kinds[degree] for degree in self.box.groups]
        return on_nodes(devices, self.models, self.host.far_share)

    def limits(self) -> dict[str, int]:
        """Return the token limit of each model's requests, on the device with the most room."""
        groups = self.by_degree or {self.box.tensor_parallel_size: self.models}
        kv_tokens = {
            name: max(
                (self.box.bytes_of(degree) - models[name].weight_bytes)
                // max(1, models[name].kv_bytes_per_token)
                for degree, models in groups.items()
                if name in models
            )
            for name in self.models
        }
        return {name: min(room, self.max_lens.get(name, room)) for name, room in kv_tokens.items()}

    def on(self, num_devices: int) -> Setup:
        """Return the setup with ``num_devices`` and the same share of prefill devices."""
        num_prefill = self.num_prefill
        if num_prefill is not None:
            share = num_prefill / self.box.num_devices
            num_prefill = min(max(1, round(share * num_devices)), max(1, num_devices - 1))
        return replace(
            self, box=replace(self.box, num_devices=num_devices), num_prefill=num_prefill
        )


@dataclass(frozen=True, slots=True)
class Attained:
    """Share of tokens on time, of all runs together and of each run.

    If the policy cannot run, ``overall`` is None and ``refused`` has the reason.
    """

    overall: float | None
    by_run: tuple[float, ...] = ()
    refused: str = ""

    @property
    def worst(self) -> float:
        """Share of the worst run; -1 without a run, so that any result is better."""
        return min(self.by_run, default=-1.0)

    def reaches(self, target: float) -> bool:
        return self.worst >= target

    def confidence(self, target: float) -> float | None:
        """Return the one-sided confidence that most draws of the load reach the target.

        If at most half of all draws did, ``n`` independent draws would all reach the target with a
        probability of at most 1/2^n. None for fewer than two draws, or a draw that missed.
        """
        num_runs = len(self.by_run)
        return 1 - 0.5**num_runs if num_runs > 1 and self.reaches(target) else None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Each model's figures, all runs together.

    ``num_refused`` prompts exceeded the model's limit, ``num_cut`` answers were shortened by the
    limit. ``num_late`` requests had no token at the end of the run; the percentiles do not include
    these requests. ``num_preemptions`` is how often a request was preempted for lack of KV memory,
    ``num_loads`` and ``num_bound`` how often an engine was loaded after the start, or taken over.
    """

    overall: Summary
    models: dict[str, Summary]
    num_requests: int
    num_refused: int
    num_cut: int
    num_late: int
    num_preemptions: int = 0
    num_loads: int = 0
    num_bound: int = 0


# Called with the name of the present search and the number of runs so far.
OnProgress = Callable[[str, int], None]


class NothingToServe(UsageError):
    """A load without a request that can be served."""


class Runner:
    """Runs setups, counts the runs and reports progress."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self._latest: tuple[Setup, list[_TrialRun]] | None = None
        self.num_runs = 0

    def attained(self, setup: Setup, what: str) -> Attained:
        """Return the share of tokens on time.

        Raises:
            NothingToServe: a run has no request.
            UsageError: the simulator cannot run the setup.
        """
        try:
            runs = self._runs(setup, what)
        except UsageError as error:
            if setup.policy not in _MAY_REFUSE or isinstance(error, NothingToServe):
                raise
            return Attained(None, refused=error.message)
        counts = [
            [count_tokens(result, outcome.end_s) for result in outcome.results]
            for outcome, _ in runs
        ]
        due = [sum(count.num_due for count in tokens) for tokens in counts]
        in_time = [sum(count.num_in_time for count in tokens) for tokens in counts]
        by_run = tuple(part / whole for part, whole in zip(in_time, due, strict=True))
        return Attained(sum(in_time) / sum(due), by_run)

    def forecast(self, setup: Setup) -> Forecast:
        """Return each model's figures. Raises as ``attained`` does."""
        runs = self._runs(setup, "what each model gets")
        results = [result for outcome, _ in runs for result in outcome.results]
        report = summarise(results, max(outcome.end_s for outcome, _ in runs))
        return Forecast(
            report.overall,
            report.models,
            num_requests=len(results),
            num_refused=sum(admitted.num_refused for _, admitted in runs),
            num_cut=sum(admitted.num_cut for _, admitted in runs),
            num_late=sum(not result.token_times_s for result in results),
            num_preemptions=sum(outcome.num_preemptions for outcome, _ in runs),
            num_loads=sum(outcome.num_loads for outcome, _ in runs),
            num_bound=sum(outcome.num_bound for outcome, _ in runs),
        )

    def _runs(self, setup: Setup, what: str) -> list[_TrialRun]:
        """Return one run per seed; runs of the latest setup are cached."""
        if self._latest is None or self._latest[0] != setup:
            self._latest = None  # frees the memory of the previous results before the new runs
            if self._on_progress is not None:
                self._on_progress(what, self.num_runs)
            seeds = setup.seeds if setup.load.is_random else setup.seeds[:1]
            self.num_runs += len(seeds)
            self._latest = setup, [_run(setup, seed) for seed in seeds]
        return self._latest[1]


class _TrialRun(NamedTuple):
    outcome: SimOutcome
    admitted: Admitted


def _run(setup: Setup, seed: int) -> _TrialRun:
    admitted = _admitted(setup, seed)
    if setup.policy in SPLITTING and setup.box.num_devices < 2:
        raise UsageError("needs two devices, one for each role")
    simulation = Simulation(
        setup.models,
        make_policy(setup.policy, PolicyOptions(num_prefill=setup.num_prefill)),
        setup.devices(),
        roles=setup.roles,
        host=host_memory(setup.box, setup.host),
        engines=engine_costs(setup.box, setup.host),
    )
    end_s = end_of_run_s(
        admitted.requests, lambda name: setup.models[name].targets, setup.load.duration_s
    )
    return _TrialRun(simulation.run(admitted.requests, end_s), admitted)


def _admitted(setup: Setup, seed: int) -> Admitted:
    poolers = {name for name, model in setup.models.items() if not model.generates}
    admitted = admit(setup.load.draw(seed), setup.limits(), poolers)
    if admitted.requests:
        return admitted
    if admitted.num_refused:
        raise NothingToServe(
            f"every prompt is too long for the model's limit of tokens on {setup.box.gpu}",
            "allow a longer max_len, or use devices with more memory",
        )
    raise NothingToServe(
        f"no request arrives in {format_duration(setup.load.duration_s)}",
        "give a longer --duration or a higher rate",
    )


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
    tried = tuple(
        RolesTried(count, text(count), attained) for count, attained in sorted(results.items())
    )
    best = best_count(results)
    if results[best].by_run[0] <= chosen.by_run[0]:
        return FixedRoles(chosen, tried)
    full = runner.attained(replace(setup, num_prefill=best), f"fixed roles {text(best)}")
    return FixedRoles(chosen, tried, RolesTried(best, text(best), full))
