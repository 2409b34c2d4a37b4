"""Groupings of a box's GPUs, and the choice for given models and load.

Aladdin's equation 6 ranks the groupings that the daemon could run; the best are simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpupoold.errors import UsageError
from gpupoold.latency.models import LatencyModel
from gpupoold.latency.profiles import measured_profiles
from gpupoold.latency.shape import MAX_GROUP_GPUS
from gpupoold.sim.boxes import Box, SimModel, groups_text
from gpupoold.sim.planner.models import PlannedModel, measured_degrees, place, place_on
from gpupoold.sim.planner.run import Attained, LoadedBox, OnProgress, Runner, Setup

_MOST_SIMULATED = 6
# Multiples of the load, tried until one does not fit, to tell groupings apart that all fit.
_MULTIPLES = (1.5, 2.0, 3.0, 5.0, 8.0)
# All groupings of a small box are ranked, of a large box those with one or two sizes.
_SMALL_BOX_GPUS = 8


@dataclass(frozen=True, slots=True)
class GroupingTried:
    """A grouping and its result; ``refused`` is why the daemon could not run it, or empty.

    ``growth`` is the largest tried multiple of the load that fits: 0 if the load does not fit.
    """

    groups: tuple[int, ...]
    attained: Attained | None = None
    growth: float = 0.0
    refused: str = ""

    @property
    def text(self) -> str:
        return groups_text(self.groups)


class GroupChoice(NamedTuple):
    """The chosen box, the groupings that were looked at, the best first, and the number of GPUs
    with which each model makes the most tokens per GPU by equation 6.
    """

    box: Box
    tried: tuple[GroupingTried, ...]
    best_degrees: dict[str, int]


@dataclass(frozen=True, slots=True)
class GroupQuestion(LoadedBox):
    """What the groups are for; ``load`` is simulated once, with ``seed``."""

    models: tuple[PlannedModel, ...]
    target: float
    policy: str = "gpupool"
    seed: int = 0


def choose_groups(question: GroupQuestion, on_progress: OnProgress | None = None) -> GroupChoice:
    """Simulate the best groupings and single GPUs; return the one that carries the most load.

    Of groupings that carry as much, the one with the larger share of tokens in time is chosen.
    Raises UsageError if no grouping can run all models.
    """
    rates = _throughputs(question)
    feasible, refused = _feasible(question, rates)
    if not feasible:
        raise UsageError(
            f"no grouping of {question.box.name} can run all models: {refused[-1].refused}",
            "use more or larger GPUs, or leave models out",
        )
    runner = Runner(on_progress)
    tried = [_simulated(question, groups, runner) for groups in feasible]
    tried.sort(
        key=lambda grouping: (
            -grouping.growth,
            -(grouping.attained.worst if grouping.attained else 0),
        )
    )
    best = {
        name: max(by_degree, key=lambda degree: by_degree[degree])
        for name, by_degree in rates.items()
        if by_degree
    }
    return GroupChoice(question.box.split(tried[0].groups), (*tried, *refused), best)


def groupings(num_gpus: int, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ways to split GPUs into groups of the sizes ``degrees``, the largest group first.

    A large box is split into groups of at most two sizes.
    """
    if num_gpus <= _SMALL_BOX_GPUS:
        return sorted(_partitions(num_gpus, sorted(degrees, reverse=True)), reverse=True)
    found: set[tuple[int, ...]] = set()
    for large in degrees:
        for small in degrees:
            for count in range(num_gpus // large + 1):
                rest = num_gpus - count * large
                if small <= large and rest % small == 0:
                    found.add((large,) * count + (small,) * (rest // small))
    return sorted(found, reverse=True)


def _partitions(num_gpus: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not num_gpus:
        yield ()
    for index, degree in enumerate(degrees):
        if degree <= num_gpus:
            for rest in _partitions(num_gpus - degree, degrees[index:]):
                yield (degree, *rest)


def _feasible(
    question: GroupQuestion, rates: Mapping[str, Mapping[int, float]]
) -> tuple[list[tuple[int, ...]], list[GroupingTried]]:
    """Return the groupings to simulate, and single GPUs if these cannot run all models."""
    num_gpus = sum(question.box.groups)
    degrees = _degrees(question)
    usable = [degree for degree in degrees if degree <= min(num_gpus, MAX_GROUP_GPUS)]
    singles = (1,) * num_gpus
    needs = _needs(question)
    ranked: list[tuple[float, tuple[int, ...]]] = []
    refused: list[GroupingTried] = []
    for groups in groupings(num_gpus, usable):
        try:
            place(question.models, question.box.split(groups))
        except UsageError as error:
            if groups == singles:
                refused.append(GroupingTried(groups, refused=error.message))
            continue
        ranked.append((_busy_share(groups, rates, needs), groups))
    ranked.sort()
    chosen = [groups for _, groups in ranked[:_MOST_SIMULATED]]
    if singles not in chosen and any(groups == singles for _, groups in ranked):
        chosen.append(singles)
    return chosen, refused


def _throughputs(question: GroupQuestion) -> dict[str, dict[int, float]]:
    """Return the tokens/s and GPU of each model by equation 6, for groups that can run it."""
    contexts = _mean_contexts(question)
    found: dict[str, dict[int, float]] = {}
    for model in question.models:
        found[model.name] = {}
        for degree in _degrees(question):
            try:
                placed, _ = place_on(model, question.box, degree)
            except UsageError:
                continue
            context = contexts.get(model.name, 1.0)
            found[model.name][degree] = _throughput(placed, question.box, degree, context)
    return found


def _degrees(question: GroupQuestion) -> list[int]:
    """Return the sizes of groups with published or own measurements."""
    own = {degree for model in question.models for degree in measured_degrees(model, question.box)}
    return sorted({profile.num_gpus for profile in measured_profiles()} | own)


def _throughput(model: SimModel, box: Box, degree: int, context_tokens: float) -> float:
    room_bytes = box.bytes_of(degree) - model.weight_bytes
    if not model.generates:  # prefills only
        return context_tokens / (degree * model.latency.prefill_s([round(context_tokens)]))
    return group_throughput(
        model.latency,
        degree,
        room_bytes,
        model.kv_bytes_per_token,
        context_tokens,
        model.targets.tbt_s,
    )


def _busy_share(
    groups: Sequence[int], rates: Mapping[str, Mapping[int, float]], needs: Mapping[str, float]
) -> float:
    """Return the part of the groups' time that the load takes, without switches.

    Each model's tokens are spread over all groups that can run the model.
    """
    total = 0.0
    for name, by_degree in rates.items():
        capacity = sum(degree * by_degree.get(degree, 0.0) for degree in groups)
        total += needs.get(name, 0.0) / max(capacity, 1e-9)
    return total


def _needs(question: GroupQuestion) -> dict[str, float]:
    """Return the tokens/s that the load asks of each model."""
    tokens: Counter[str] = Counter()
    for request in question.load.draw(question.seed):
        tokens[request.model] += max(1, request.output_tokens)
    return {name: count / question.load.duration_s for name, count in tokens.items()}


def _mean_contexts(question: GroupQuestion) -> dict[str, float]:
    """Return the mean context of a decode step by model: the prompt and half of the answer."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for request in question.load.draw(question.seed):
        sums[request.model] += request.prompt_tokens + request.output_tokens // 2
        counts[request.model] += 1
    return {name: sums[name] / counts[name] for name in counts}


def _simulated(question: GroupQuestion, groups: tuple[int, ...], runner: Runner) -> GroupingTried:
    """Simulate a grouping, with growing loads while they fit."""
    box = question.box.split(groups)
    placed = place(question.models, box)
    setup = Setup(
        box,
        question.load,
        placed.models,
        (question.seed,),
        question.policy,
        max_lens=question.max_lens,
        by_degree=placed.by_degree,
        host=question.host,
    )
    what = f"groups {groups_text(groups)}"
    attained = runner.attained(setup, what)
    growth = 0.0
    if attained.reaches(question.target):
        growth = 1.0
        for factor in _MULTIPLES:
            more = replace(setup, load=question.load.scaled(factor))
            if not runner.attained(more, f"{what}, {factor:g} times").reaches(question.target):
                break
            growth = factor
    return GroupingTried(groups, attained, growth)


def group_throughput(
    latency: LatencyModel,
    num_gpus: int,
    room_bytes: int,
    kv_bytes_per_token: int,
    context_tokens: float,
    tbt_s: float,
) -> float:
    """Return the most tokens per second and GPU of a group of ``num_gpus`` (Aladdin, equation 6).

    ``latency`` holds for the group: its iteration time takes the place of equation 5, which
    interpolates between groups. ``room_bytes`` is the memory beside the weights, on all GPUs. The
    batch is as large as the KV of sequences of ``context_tokens`` allows, or as a step of ``tbt_s``
    allows; 0 if neither allows a sequence.
    """
    by_memory = room_bytes / max(1.0, context_tokens * kv_bytes_per_token)
    context = max(1, round(context_tokens))
    one_s = latency.decode_step_s(1, context)
    per_sequence_s = latency.decode_step_s(2, 2 * context) - one_s  # the laws are linear
    base_s = one_s - per_sequence_s
    by_target = (tbt_s - base_s) / max(per_sequence_s, 1e-9)
    if min(by_memory, by_target) < 1:
        return 0.0
    full_s = base_s + by_memory * per_sequence_s
    return min(by_memory / (num_gpus * full_s), by_target / (num_gpus * tbt_s))
