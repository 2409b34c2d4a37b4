"""The default policy beside simpler ones on boxes and loads that nobody chose: the sweep.

    python -m benchmarks.sweep [--draws 7,12] [--tuning]

Each draw is a box, models, targets, lengths, skew and bursts by its number. Tuning looks at odd
numbers only; what is claimed holds for even numbers. ``make bench-sim`` runs all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gpupoold.domain import Targets
from gpupoold.sim.boxes import SimModel, models_on, parse_box, why_too_large
from gpupoold.sim.lengths import Lengths, LengthSource, length_variant, sharegpt_lengths
from gpupoold.sim.run import RunRow, run_points
from gpupoold.sim.scenario import Draw, DrawnModel, DrawnWorkload, FigurePanel, Workload
from gpupoold.sim.workloads import SimRequest, in_arrival_order, model_names

NUM_DRAWS = 200
POLICIES = ("gpupool", "request-level", "aegaeon", "decode-first", "best-fit", "shortest-queue")
# Another policy does better if its attainment is higher by more than this.
BETTER_BY = 0.002

_BOXES = (
    *("A10", "2xA10", "4xA10", "L40S", "2xL40S", "4xRTX 4090"),
    *("2xA100-40", "A100-80", "2xA100-80", "H800", "2xH800", "4xH800"),
)
_SHAPES = ("Yi-1.5-6B", "Qwen2.5-7B", "Llama-3.1-8B", "Yi-1.5-9B", "Llama-2-13B", "Qwen-14B")
_LARGE_SHAPES = (*_SHAPES, "Qwen2.5-32B")
_TTFT_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_TBT_S = (0.05, 0.1, 0.2)
# One of these for each model in turn, as on a box with chats, agents and batches.
_MIXED_TARGETS = (
    *(Targets(1.0, 0.05), Targets(10.0, 0.1)),
    *(Targets(30.0, 0.5), Targets(2.0, 0.1)),
)
_LOADS = (0.1, 0.9)
_BATCH = 8  # the size of the batches by which the work of a request is estimated
_DURATION_S = 240.0
_MAX_REQUESTS = 2000
_BURST = 4.0
_BURST_PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Draw from one of several sources of lengths, each as often."""

    sources: tuple[LengthSource, ...]

    def sample(self, rng: Random) -> Lengths:
        """Return the lengths of one more request."""
        return rng.choice(self.sources).sample(rng)


@dataclass(frozen=True, slots=True)
class FewTokens:
    """Answers of classifiers, routers and calls of tools."""

    prompt_tokens: int

    def sample(self, rng: Random) -> Lengths:
        """Return a prompt of about the given length, and an answer of 1 to 8 tokens."""
        return Lengths(max(1, round(self.prompt_tokens * rng.uniform(0.5, 1.5))), rng.randint(1, 8))


def _sources() -> dict[str, LengthSource]:
    chats = sharegpt_lengths()
    return {
        "chats": chats,
        "prompts x2": length_variant(chats, "ix2"),
        "answers x2": length_variant(chats, "ox2"),
        "retrieval": Lengths(2048, 28),
        "classes": Lengths(600, 2),
        "tools": FewTokens(800),
        "short": Lengths(100, 60),
        "documents": Lengths(6000, 300),
        "reasoning": Lengths(300, 1500),
        "chats and classes": Choice((chats, FewTokens(400))),
    }


@dataclass(frozen=True, slots=True)
class DrawnBox(Workload):
    """The workload of a draw, whatever models, rate and seed are asked for."""

    workload: DrawnWorkload

    def draw(self, draw: Draw) -> DrawnWorkload:
        return self.workload


def draw_panel(number: int) -> FigurePanel:
    """Return a draw: the same for the same number, in any process."""
    rng = Random(f"sweep {number}")
    box = parse_box(rng.choice(_BOXES))
    able = [shape for shape in _LARGE_SHAPES if not why_too_large(box, shape)]
    shapes = rng.sample(able, min(len(able), rng.randint(1, 3)))
    names = model_names(rng.randint(2, 6 * box.num_devices))
    targets = _drawn_targets(rng, len(names))
    lengths_name, lengths = rng.choice(list(_sources().items()))
    of_models = {
        name: DrawnModel(shapes[index % len(shapes)], targets[index])
        for index, name in enumerate(names)
    }
    models = models_on(box, {name: one.shape for name, one in of_models.items()}, targets[0])
    skew, arrivals = rng.choice((0.0, 1.0, 1.5)), rng.choice(list(_ARRIVALS))
    load = rng.uniform(*_LOADS)
    shares = [(rank + 1) ** -skew for rank in range(len(names))]
    work_s = sum(
        share * _work_s(models[name], lengths) for share, name in zip(shares, names, strict=True)
    )
    unit_rps = load * box.num_devices / work_s
    unit_rps = min(unit_rps, _MAX_REQUESTS / _DURATION_S / sum(shares))
    requests: list[SimRequest] = []
    for share, name in zip(shares, names, strict=True):
        sizes = Random(f"{number}/{name}")
        for arrival_s in _ARRIVALS[arrivals](Random(f"{number}/{name}/times"), share * unit_rps):
            requests.append(SimRequest("", name, arrival_s, *lengths.sample(sizes)))
    title = (
        f"{box.name}, {len(names)} of {'/'.join(shapes)}, {lengths_name}, load {load:.2f}, "
        f"skew {skew:g}, {arrivals}, {_shown_targets(targets)}"
    )
    drawn = DrawnWorkload(in_arrival_order(requests), tuple(names), _DURATION_S, of_models)
    return FigurePanel(
        f"draw-{number}",
        title,
        box,
        DrawnBox(drawn),
        POLICIES if box.num_devices > 1 else POLICIES[:4],
        targets=min(targets, key=lambda one: (one.ttft_s, one.tbt_s)),
        seed=number,
    )


def _drawn_targets(rng: Random, num_models: int) -> list[Targets]:
    if rng.random() < 0.3:
        return list(itertools.islice(itertools.cycle(_MIXED_TARGETS), num_models))
    return [Targets(rng.choice(_TTFT_S), rng.choice(_TBT_S))] * num_models


def _shown_targets(targets: Sequence[Targets]) -> str:
    if len(set(targets)) > 1:
        return "mixed targets"
    return f"{targets[0].ttft_s:g} s/{1000 * targets[0].tbt_s:g} ms"


def _work_s(model: SimModel, lengths: LengthSource) -> float:
    """Return about the seconds of a device that a request takes in batches, without switches."""
    rng, work_s, num = Random(0), 0.0, 50
    for _ in range(num):
        prompt_tokens, output_tokens = lengths.sample(rng)
        step_s = model.latency.decode_step_s(_BATCH, _BATCH * prompt_tokens)
        work_s += model.latency.prefill_s([prompt_tokens]) + output_tokens * step_s / _BATCH
    return work_s / num


def _poisson(rng: Random, rps: float) -> Iterator[float]:
    at_s = rng.expovariate(rps)
    while at_s < _DURATION_S:
        yield at_s
        at_s += rng.expovariate(rps)


def _gamma(rng: Random, rps: float) -> Iterator[float]:
    """Yield arrivals whose gaps have a coefficient of variation of 4."""
    shape = 1 / 16
    at_s = rng.gammavariate(shape, 1 / (shape * rps))
    while at_s < _DURATION_S:
        yield at_s
        at_s += rng.gammavariate(shape, 1 / (shape * rps))


def _on_off(rng: Random, rps: float) -> Iterator[float]:
    """Yield arrivals at four times the rate in a quarter of the time."""
    phase_s = rng.uniform(0, _BURST_PERIOD_S)
    for at_s in _poisson(rng, rps * _BURST):
        if (at_s + phase_s) % _BURST_PERIOD_S < _BURST_PERIOD_S / _BURST:
            yield at_s


_ARRIVALS = {"poisson": _poisson, "gamma": _gamma, "on-off": _on_off}


def sweep(draws: Iterable[int], jobs: int) -> Iterator[list[RunRow]]:
    """Yield the rows of each draw, in order: one for each policy."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(rows_of, draws)


def rows_of(number: int) -> list[RunRow]:
    """Run a draw with all its policies."""
    return list(run_points(draw_panel(number).points()))


@dataclass(frozen=True, slots=True)
class Loss:
    """A draw in which another policy kept more of its promises."""

    draw: int
    policy: str
    attainment: float
    best: float

    @property
    def points(self) -> float:
        """The difference in percentage points."""
        return 100 * (self.best - self.attainment)

    def __str__(self) -> str:
        return (
            f"{self.attainment:7.1%} {self.best:7.1%} of {self.policy}: "
            f"{draw_panel(self.draw).title}: python -m benchmarks.sweep --draws {self.draw}"
        )


def _by_draw(rows: Iterable[RunRow]) -> dict[int, dict[str, float]]:
    """Return the attainment of each policy in each draw."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["attainment"] is not None:
            found.setdefault(row["seed"], {})[row["policy"]] = row["attainment"]
    return found


def losses(rows: Iterable[RunRow]) -> list[Loss]:
    """Return the draws lost by more than ``BETTER_BY``, each to its best rival, worst first."""
    found = []
    for number, attainments in _by_draw(rows).items():
        own = attainments.get("gpupool", 1.0)
        rival = max(attainments, key=lambda name: attainments[name])
        if attainments[rival] > own + BETTER_BY:
            found.append(Loss(number, rival, own, attainments[rival]))
    return sorted(found, key=lambda loss: -loss.points)


def summary(rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Return the table of the sweep: draws, losses, the worst, for each half and policy's mean."""
    table = []
    for half, rest in (("tuned on", 1), ("judged on", 0)):
        of_half = [row for row in rows if row["seed"] % 2 == rest]
        if not of_half:
            continue
        lost, draws = losses(of_half), _by_draw(of_half).values()
        # On one device, policies that only place requests are the default policy.
        means = {
            name: _mean(found.get(name, found.get("gpupool")) for found in draws)
            for name in POLICIES
        }
        table.append(
            {
                "draws": half,
                "num_draws": len(draws),
                "num_losses": len(lost),
                "worst_points": lost[0].points if lost else 0.0,
                "worst_draw": lost[0].draw if lost else None,
                "attainment": means,
            }
        )
    return table


def shown_losses(rows: Iterable[RunRow]) -> list[str]:
    """Return a line for each loss, with the command that runs its draw."""
    return [str(loss) for loss in losses(rows)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def main() -> int:
    """Run draws; exit code 1 if another policy does better in any."""
    arguments = _parse()
    every = range(1, NUM_DRAWS, 2) if arguments.tuning else range(NUM_DRAWS)
    rows: list[RunRow] = []
    for found in sweep(arguments.draws or every, arguments.jobs):
        rows += found
        if arguments.draws:
            print(draw_panel(found[0]["seed"]).title)
            for row in found:
                print(f"  {row['policy']:15}{row['attainment'] or 0.0:7.1%}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"rows": rows, "sweep": summary(rows)}) + "\n")
    lost = losses(rows)
    for line in summary(rows):
        print(
            "{num_draws} draws {draws}: {num_losses} lost, worst {worst_points:.1f}".format(**line)
        )
    for loss in lost:
        print(loss)
    return 1 if lost else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--draws",
        type=lambda text: [int(number) for number in text.split(",")],
        help="numbers of draws, with the results of all policies (default: all)",
    )
    parser.add_argument("--tuning", action="store_true", help="only the draws that tuning may see")
    parser.add_argument("--out", type=Path, help="write all rows there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
