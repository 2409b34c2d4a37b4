"""Experiments as data: panels of figures, points of sweeps, scenarios to run.

A *panel* defines one plot: box, workload, targets, policies, swept axis. A *point* is one run of a
panel. A *scenario* is a point with its models and requests drawn.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from gpupoold.domain import Role, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import DEFAULT_SHAPES, Box, SimModel, models_on, why_too_large
from gpupoold.sim.host import NO_WISHES, HostMemory, HostWishes, engine_costs, host_memory
from gpupoold.sim.hosting import EngineCosts
from gpupoold.sim.lengths import Lengths, LengthSource, length_variant, sharegpt_lengths
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.workloads import (
    SimRequest,
    equal_rates,
    in_arrival_order,
    model_names,
    poisson_workload,
)
from gpupoold.units import format_duration

Axis = Literal["models", "rps"]
# Time for the last requests to end, as a multiple of the workload's duration.
_DRAIN_FACTOR = 3
_MAX_MODELS = 10_000
_USUAL_TARGETS = Targets()
# Size classes that a trace may append to model names, and the packaged model for each class.
SIZE_CLASSES = {
    "small": "Yi-1.5-6B",
    "mid": "Yi-1.5-9B",
    "large": "Qwen-14B",
    "reason": "Qwen2.5-32B",
    "r1": "Qwen2.5-32B",
}

AUTO: Literal["auto"] = "auto"
_PART = re.compile(r"(?:(\d+)\s*x\s*)?([a-z]+)")
_MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of a draw; None keeps the workload's own.

    ``rps`` is the mean rate per model.
    """

    num_models: int | None
    rps: float | None
    duration_s: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class DrawnModel:
    """Dimensions and targets of a model, if not the panel's."""

    shape: str
    targets: Targets


@dataclass(frozen=True, slots=True)
class DrawnWorkload:
    """Requests in order of arrival, all models, and the duration.

    ``own`` has dimensions and targets of models that do not have the panel's.
    """

    requests: tuple[SimRequest, ...]
    models: tuple[str, ...]
    duration_s: float
    own: Mapping[str, DrawnModel] = field(default_factory=dict)


class Workload(ABC):
    """An immutable source of requests; files need ``needs_folder`` and ``located`` too."""

    __slots__ = ()

    @property
    def needs_folder(self) -> bool:
        """True if ``located`` must find a file."""
        return False

    def located(self, folder: Path | None) -> Self:
        """Return the workload with its files found in ``folder``. Raises UsageError if missing."""
        return self

    @abstractmethod
    def draw(self, draw: Draw) -> DrawnWorkload:
        """Return the requests of one run, equal for equal arguments. Raises UsageError."""


@dataclass(frozen=True, slots=True)
class PoissonArrivals(Workload):
    """Poisson arrivals, equal for all models.

    ``lengths``: a variant of ShareGPT's lengths, or constant lengths.
    """

    lengths: str | Lengths = "ix1"

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError without a number of models, a rate and a duration."""
        if draw.num_models is None or draw.rps is None or draw.duration_s is None:
            raise UsageError("Poisson arrivals need a number of models, a rate and a duration")
        names = tuple(model_names(draw.num_models))
        lengths: LengthSource = (
            self.lengths
            if isinstance(self.lengths, Lengths)
            else length_variant(sharegpt_lengths(), self.lengths)
        )
        rates = equal_rates(names, draw.rps)
        requests = poisson_workload(rates, draw.duration_s, lengths, draw.seed)
        return DrawnWorkload(requests, names, draw.duration_s)


@dataclass(frozen=True, slots=True)
class FixedRequests(Workload):
    """A fixed list of requests."""

    requests: tuple[SimRequest, ...]
    duration_s: float

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError if a number of models, a rate or a duration is given."""
        if (draw.num_models, draw.rps, draw.duration_s) != (None, None, None):
            raise UsageError("this preset's requests are fixed: no --models, --rps or --duration")
        models = tuple(sorted({request.model for request in self.requests}))
        return DrawnWorkload(self.requests, models, self.duration_s)


@dataclass(frozen=True, slots=True)
class Phases(Workload):
    """Poisson arrivals for one model at a changing rate, with constant lengths.

    ``phases``: consecutive pairs of seconds and requests per second.
    """

    phases: tuple[tuple[float, float], ...]
    lengths: Lengths

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError if a number of models, a rate or a duration is given."""
        if (draw.num_models, draw.rps, draw.duration_s) != (None, None, None):
            raise UsageError("this preset's rates are fixed: no --models, --rps or --duration")
        names = model_names(1)
        requests: list[SimRequest] = []
        begin_s = 0.0
        for number, (seconds, rps) in enumerate(self.phases):
            seed = draw.seed * len(self.phases) + number
            drawn = poisson_workload(equal_rates(names, rps), seconds, self.lengths, seed)
            requests += [
                replace(request, arrival_s=begin_s + request.arrival_s) for request in drawn
            ]
            begin_s += seconds
        return DrawnWorkload(in_arrival_order(requests), tuple(names), begin_s)


@dataclass(frozen=True, slots=True)
class Overrides:
    """A caller's changes to a panel; None keeps the panel's value."""

    policies: tuple[str, ...] | None = None
    models: tuple[int, ...] | None = None
    rps: tuple[float, ...] | None = None
    box: Box | None = None
    tensor_parallel_size: int | None = None
    num_prefill: int | None = None
    roles: tuple[Role, ...] | Literal["auto"] | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None
    duration_s: float | None = None
    seed: int | None = None
    switch_overhead_s: float | None = None
    host_wishes: HostWishes = NO_WISHES
    num_families: int | None = None
    workloads_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class FigurePanel:
    """A plot: attainment of ``policies`` over the values of ``axis``.

    Empty ``models`` or ``rps`` keep the workload's. ``num_prefill`` is the number of devices with
    the prefill role, for policies that split roles; ``without_prefetch`` names the policies to run
    without prefetches. With ``service_s`` the rows have the mean number of models in use if each
    request took so many seconds. ``roles`` has one role for all devices or a role for each; with
    None the policy chooses. ``burst_s`` is the start and end of a burst; the rows then have the
    TTFT of requests in the burst. ``host_wishes`` are budgets other than the daemon's defaults.
    With ``num_families`` the models are fine-tunes of so many models.
    """

    name: str
    title: str
    box: Box
    workload: Workload
    policies: tuple[str, ...]
    axis: Axis = "models"
    models: tuple[int, ...] = ()
    rps: tuple[float, ...] = ()
    targets: Targets = _USUAL_TARGETS
    duration_s: float | None = None
    seed: int = 0
    shapes: tuple[str, ...] = DEFAULT_SHAPES
    num_prefill: int | None = None
    without_prefetch: tuple[str, ...] = ()
    switch_overhead_s: float = 0.0
    service_s: float | None = None
    roles: tuple[Role, ...] | None = None
    converts_decoders: bool = True
    burst_s: tuple[float, float] | None = None
    host_wishes: HostWishes = NO_WISHES
    num_families: int | None = None

    @property
    def host(self) -> HostMemory:
        """Host memory of the box. Raises UsageError for impossible wishes."""
        return host_memory(self.box, self.host_wishes)

    @property
    def engines(self) -> EngineCosts | None:
        """Costs of engines. Raises UsageError for impossible wishes."""
        return engine_costs(self.box, self.host_wishes)

    @property
    def device_roles(self) -> tuple[Role, ...] | None:
        """One role per device; None if the policy chooses."""
        if self.roles is None or len(self.roles) != 1:
            return self.roles
        return self.roles * self.box.num_devices

    def changed(self, wanted: Overrides) -> FigurePanel:
        """Return the panel with the changes applied.

        If the box changes, the panel's number of prefill devices no longer applies. Raises
        UsageError if the workload's files are missing, or the GPUs do not form groups.
        """
        box, num_prefill = wanted.box or self.box, wanted.num_prefill
        if wanted.tensor_parallel_size is not None:
            box = box.grouped(wanted.tensor_parallel_size)
        if num_prefill is None and box == self.box:
            num_prefill = self.num_prefill
        targets = Targets(
            self.targets.ttft_s if wanted.ttft_s is None else wanted.ttft_s,
            self.targets.tbt_s if wanted.tbt_s is None else wanted.tbt_s,
        )
        kept = (
            "policies",
            "models",
            "rps",
            "duration_s",
            "seed",
            "switch_overhead_s",
            "num_families",
        )
        simple = {k: v for k in kept if (v := getattr(wanted, k)) is not None}
        return replace(
            self,
            box=box,
            num_prefill=num_prefill,
            targets=targets,
            axis=self._axis(wanted),
            workload=self.workload.located(wanted.workloads_dir),
            roles=self._roles(wanted),
            host_wishes=wanted.host_wishes.over(self.host_wishes),
            **simple,
        )

    def _roles(self, wanted: Overrides) -> tuple[Role, ...] | None:
        if wanted.roles == "auto":
            return None
        return self.roles if wanted.roles is None else wanted.roles

    def _axis(self, wanted: Overrides) -> Axis:
        """Return the axis with several values; the panel's axis if both have, or neither has."""
        num_models = len(self.models if wanted.models is None else wanted.models)
        num_rps = len(self.rps if wanted.rps is None else wanted.rps)
        if num_models > 1 >= num_rps:
            return "models"
        return "rps" if num_rps > 1 >= num_models else self.axis

    def points(self) -> list[Point]:
        """Return all runs of the panel, policy by policy. Raises UsageError for wrong values."""
        self._check()
        swept = itertools.product(
            dict.fromkeys(self.policies),
            dict.fromkeys(self.models) or (None,),
            dict.fromkeys(self.rps) or (None,),
        )
        return [Point(self, policy, models, rps) for policy, models, rps in swept]

    def _check(self) -> None:
        for num_models in self.models:
            if num_models > _MAX_MODELS:
                raise UsageError(f"{num_models} models: at most {_MAX_MODELS} fit in a run")
            model_names(num_models)
        for rps in self.rps:
            if not (math.isfinite(rps) and rps > 0):
                raise UsageError(f"rate {rps} requests/s: must be above 0")
        num_devices = self.box.num_devices
        if self.num_prefill is not None and not 0 < self.num_prefill < num_devices:
            raise UsageError(
                f"{self.num_prefill} prefill devices of {num_devices}: at least one must prefill "
                "and one decode"
            )
        if self.device_roles is not None and len(self.device_roles) != num_devices:
            raise UsageError(
                f"{len(self.device_roles)} roles for {num_devices} devices",
                "name a role for each, such as 2xprefill,6xdecode, or a role for all",
            )
        for policy in self.policies:
            make_policy(policy, PolicyOptions(num_prefill=self.num_prefill))


@dataclass(frozen=True, slots=True)
class Point:
    """A run of a panel."""

    panel: FigurePanel
    policy: str
    num_models: int | None
    rps: float | None

    @property
    def preset(self) -> str:
        """The panel's name, with a suffix if the other axis is swept as well."""
        panel = self.panel
        if panel.axis == "models" and len(panel.rps) > 1:
            return f"{panel.name} rps={self.rps:g}"
        if panel.axis == "rps" and len(panel.models) > 1:
            return f"{panel.name} models={self.num_models}"
        return panel.name

    def __str__(self) -> str:
        models = "" if self.num_models is None else f", {self.num_models} models"
        return f"{self.preset}: {self.policy}{models}" + (f", {self.rps:g} rps" if self.rps else "")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A point ready to run: models on its panel's box, and the requests in ``duration_s``."""

    point: Point
    models: Mapping[str, SimModel]
    requests: tuple[SimRequest, ...]
    duration_s: float

    @property
    def end_s(self) -> float:
        return end_of_run_s(self.requests, lambda name: self.models[name].targets, self.duration_s)


def end_of_run_s(
    requests: Sequence[SimRequest], targets_of: Callable[[str], Targets], duration_s: float
) -> float:
    """Return the end of a run: a time when every token is due, so a missing token is late."""
    due_s = (
        targets_of(request.model).deadline_s(request.arrival_s, request.output_tokens - 1)
        for request in requests
    )
    return max(duration_s * (1 + _DRAIN_FACTOR), max(due_s, default=0.0))


def build_scenario(point: Point) -> Scenario:
    """Draw the point's requests and place its models on the box.

    Raises UsageError as for the workload, ``models_on`` and ``families_of``.
    """
    panel = point.panel
    asked = Draw(point.num_models, point.rps, panel.duration_s, panel.seed)
    drawn = panel.workload.draw(asked)
    shapes = {
        name: SIZE_CLASSES.get(name.rpartition("-")[2], panel.shapes[index % len(panel.shapes)])
        for index, name in enumerate(drawn.models)
    }
    shapes |= {name: model.shape for name, model in drawn.own.items()}
    models = models_on(panel.box, shapes, panel.targets)
    models |= {
        name: replace(models[name], targets=model.targets) for name, model in drawn.own.items()
    }
    if panel.num_families is not None:
        families = families_of(shapes, panel.num_families, panel.box)
        models = {name: replace(model, family=families[name]) for name, model in models.items()}
    return Scenario(point, models, drawn.requests, drawn.duration_s)


def families_of(shapes: Mapping[str, str], num_families: int, box: Box) -> dict[str, str]:
    """Return a family for each model of ``shapes``: the models of one shape take turns in families.

    Raises UsageError if there are fewer families than shapes, or the devices are groups, which
    share no engines.
    """
    kinds = list(dict.fromkeys(shapes.values()))
    if num_families < len(kinds):
        raise UsageError(
            f"{num_families} families: models of {len(kinds)} sizes have at least as many"
        )
    if box.tensor_parallel_size > 1:
        raise UsageError("engines on groups of GPUs are not shared: no --families")
    families: dict[str, str] = {}
    for kind, shape in enumerate(kinds):
        own = itertools.cycle(range(kind, num_families, len(kinds)))
        families |= {name: f"family-{next(own)}" for name in shapes if shapes[name] == shape}
    return families


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


def changed_panel(panel: FigurePanel, wanted: Overrides) -> tuple[FigurePanel, list[str]]:
    """Return the panel with the changes, and why dimensions of models were left out.

    The other dimensions take the place of those that exceed a device. Recorded requests keep their
    models. Raises UsageError if all dimensions exceed a device, or as for ``FigurePanel.changed``.
    """
    changed = panel.changed(wanted)
    if _load(changed) != _load(panel):
        changed = replace(changed, title=description(changed))
    reasons = {shape: why_too_large(changed.box, shape) for shape in changed.shapes}
    fitting = tuple(shape for shape in changed.shapes if not reasons[shape])
    left_out = [reason for reason in reasons.values() if reason]
    if not fitting:
        raise UsageError(left_out[0], "use groups of GPUs (such as 2x4xH800), or larger GPUs")
    return replace(changed, shapes=fitting), left_out


def description(panel: FigurePanel) -> str:
    """Return the box, the load and unusual targets in words."""
    words = [panel.box.name]
    if panel.box.degrees != (1,):
        words[0] += f" in groups of {' and '.join(map(str, dict.fromkeys(panel.box.degrees)))}"
    if panel.axis == "rps" and len(panel.models) == 1:
        words.append(f"{panel.models[0]} models")
    if panel.axis == "models" and len(panel.rps) == 1:
        words.append(f"{panel.rps[0]:g} rps per model")
    if panel.targets != Targets():
        ttft, tbt = map(format_duration, (panel.targets.ttft_s, panel.targets.tbt_s))
        words.append(f"TTFT {ttft}, TBT {tbt}")
    return ", ".join(words)


def _load(panel: FigurePanel) -> tuple[object, ...]:
    return panel.box, panel.models, panel.rps, panel.targets
