"""Single changes to a box that does not fit, from the cheapest: targets, load, hardware.

A change has a :class:`~gpupoold.sim.planner.run.Setup`; the planner simulates the setup to find out
whether the change suffices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpupoold.errors import UsageError
from gpupoold.latency.models import SwitchModel
from gpupoold.latency.shape import hardware, hardware_profiles
from gpupoold.sim.boxes import Box
from gpupoold.sim.model import SimModel
from gpupoold.sim.planner.run import Setup
from gpupoold.units import format_duration

ModelsOn = Callable[[Box], Mapping[str, SimModel]]
_ROUND = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
_NUM_STEPS = 3
_LOAD_SHARES = (0.9, 0.75, 0.5)
_FASTER_LINK = 2.0

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change; ``kind`` is the change's name in JSON, ``text`` the instruction."""

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
    changed = replace(setup, models=models, load=setup.load.without(name))
    return PlanChange("move", f"move {what} to another box", changed)


def _less_load(setup: Setup, share: float) -> PlanChange:
    text = f"send only {100 * share:.0f} % of this load here"
    return PlanChange("load", text, replace(setup, load=setup.load.scaled(share)))


def _faster_link(setup: Setup) -> PlanChange:
    now = min(m.latency.switch.bandwidth_bytes_per_s for m in setup.models.values())
    models = {
        name: replace(model, latency=replace(model.latency, switch=_faster(model.latency.switch)))
        for name, model in setup.models.items()
    }
    text = (
        f"a host link {_FASTER_LINK:g} times as fast "
        f"({_FASTER_LINK * now / 1e9:.3g} GB/s instead of {now / 1e9:.3g})"
    )
    return PlanChange("link", text, replace(setup, models=models))


def _faster(link: SwitchModel) -> SwitchModel:
    return SwitchModel(_FASTER_LINK * link.bandwidth_bytes_per_s)


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
    for gpu in sorted(better, key=lambda one: one.memory_bandwidth_bytes_per_s)[:1]:
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
