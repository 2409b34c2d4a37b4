"""Published figures and tables beside the simulator's, for ``docs/internals/papers.md``.

The published numbers are from the papers' text and tables. Ours come from the rows of
``benchmarks/sim.py``, or from latency laws and formulas where no simulation is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from benchmarks.decision_times import decision_times_s
from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.profiles import latency_for, measured_profiles
from gpupoold.latency.shape import builtin_shape, hardware
from gpupoold.scheduling.events import costs_of
from gpupoold.scheduling.observed import RequestClass
from gpupoold.scheduling.roles import batch_velocity, decoders_load, prefill_velocity
from gpupoold.scheduling.state import Speed
from gpupoold.sim.boxes import USABLE_SHARE, Box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.planner.groups import group_throughput
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.presets import preset_panels
from gpupoold.sim.run import RunRow, run_points
from gpupoold.sim.scenario import Draw, Overrides, Point, build_scenario
from gpupoold.stats.histogram import percentile

PAPERS = ("Aegaeon", "Prism", "TokenScale", "Aladdin")

Goodputs = Mapping[str, Mapping[str, Any]]

# TokenScale, table II: tokens/s of one decoder (A100-40; 32B: four of them), by prompt and answer.
_BUCKETS = tuple(
    RequestClass(prompt, answer) for prompt in (256, 1024, 8192) for answer in (100, 350, 610)
)
_VELOCITIES = {
    "Llama-3.1-8B": (23535, 8146, 5138, 33106, 9794, 5766, 39551, 11310, 6495),
    "Qwen2.5-32B": (17500, 8401, 6667, 24917, 12536, 8812, 24044, 11547, 9128),
}
_DECODER_GPUS = {"Llama-3.1-8B": 1, "Qwen2.5-32B": 4}
# Prism, figure 9: seconds to activate a model on H100s, and the GPUs.
# The paper names sizes of models only; the second entry is our model of that size.
_ACTIVATIONS = {
    "8B": ("Llama-3.1-8B", 0.7, 1),
    "14B": ("Qwen-14B", 1.3, 1),
    "70B": ("Llama-3.1-70B", 1.5, 8),
}
_BASELINES = {"14B": " (baseline: 7.1, 5.5 x)"}
# Aladdin, table 1: the same workers on another card.
_ON_V100 = {"Llama-2-7B": 1, "Llama-2-13B": 2}


class PaperFigure(TypedDict):
    """A published number and ours; ``why`` they differ, or what is not the same."""

    paper: str
    figure: str
    quantity: str
    published: str
    ours: str
    why: str


def paper_figures(
    rows: Sequence[RunRow], goodputs: Goodputs, workloads: Path | None
) -> list[PaperFigure]:
    """Return all figures that can be had; those without their rows are left out."""
    parts: Iterable[Iterator[PaperFigure]] = (
        _aegaeon(rows, goodputs),
        _prism(workloads),
        _tokenscale(rows, workloads),
        _aladdin(goodputs),
    )
    return [figure for part in parts for figure in part]


def _aegaeon(rows: Sequence[RunRow], goodputs: Goodputs) -> Iterator[PaperFigure]:
    def figure(name: str, quantity: str, published: str, ours: str, why: str = "") -> PaperFigure:
        return PaperFigure(
            paper="Aegaeon", figure=name, quantity=quantity, published=published, ours=ours, why=why
        )

    for row in rows:
        if row["preset"] == "aegaeon-fig4":
            active = f"{row['active_models_mean']:.1f}"
            yield figure("4", "models in use, mean of 100", "46.55", active)
    by_policy = {one["policy"]: one for one in rows if one["preset"] == "aegaeon-fig6"}
    if by_policy:
        ours = ", ".join(f"{name} {_percent(one)}" for name, one in by_policy.items())
        why = "weights are evicted in part, so switches for prompts are short here"
        yield figure("6", "tokens in time", "only split roles meet both targets", ours, why)
    for name, published in (
        ("11a", "2 x ServerlessLLM"),
        ("11b", "2.5 x ServerlessLLM"),
        ("12-ox2", "up to 2.5 x ServerlessLLM"),
        ("13a", "at least 1.5 x ServerlessLLM and MuxServe"),
        ("13b", "at least 1.125 x ServerlessLLM and MuxServe"),
    ):
        loads = goodputs.get(f"aegaeon-fig{name}", {})
        yield from _ratios(figure, name, loads, "request-level-4", published)
        if name in ("13a", "13b"):
            yield from _ratios(figure, name, loads, "static", published)
    slow = goodputs.get("aegaeon-fig11a-slow-switch", {}).get("request-level")
    best = goodputs.get("aegaeon-fig11a", {}).get("aegaeon")
    if slow and best:
        ratio = f"{best['load'] / slow['load']:.2f} x"
        yield figure("11a", "the same with 3 s more per load for the rival", "2 x", ratio)
        per_gpu = f"{best['load'] / 10:.1f}"
        yield figure("11a", "models per decode GPU at 0.1 requests/s each", "7", per_gpu)
    strict = goodputs.get("aegaeon-fig13c", {})
    if strict.get("aegaeon") and strict.get("static"):
        ours = f"aegaeon {_load(strict['aegaeon'])}, static {_load(strict['static'])}"
        for policy in ("request-level-4", "gpupool"):
            ours += f", {policy} {_load(strict[policy])}" if strict.get(policy) else ""
        published = "less than MuxServe, more than ServerlessLLM"
        why = "the second half is reversed here"
        yield figure("13c", "models at 90 %", published, ours, why)
    left = [goodputs.get(f"aegaeon-fig17-a10{part}", {}) for part in ("-strict", "", "-loose")]
    if all(one.get("aegaeon") for one in left):
        for policy in ("aegaeon", "gpupool"):
            ours = ", ".join(_load(one[policy]) for one in left if one.get(policy))
            what = f"models at 90 %, TBT x 0.5, 1, 2: {policy}"
            yield figure("17 left", what, "loose much more than strict", ours)
    right = goodputs.get("aegaeon-fig17-72b", {})
    yield from _ratios(figure, "17 right", right, "request-level-4", "as on one GPU")


def _ratios(
    figure: Callable[..., PaperFigure],
    name: str,
    loads: Mapping[str, Any],
    rival_name: str,
    published: str,
    policies: Sequence[str] = ("aegaeon", "gpupool"),
) -> Iterator[PaperFigure]:
    """Yield the loads of policies as multiples of a rival's, if any of them has run."""
    if not (rival := loads.get(rival_name)):
        return
    ratios = []
    for policy in policies:
        if best := loads.get(policy):
            bound = "at least " if best["is_lower_bound"] else ""
            ratios.append(f"{policy} {bound}{best['load'] / rival['load']:.2f} x")
    if ratios:
        yield figure(name, f"load at 90 % over {rival_name}", published, ", ".join(ratios))


def _prism(workloads: Path | None) -> Iterator[PaperFigure]:
    for size, (name, published_s, num_gpus) in _ACTIVATIONS.items():
        shape, link = builtin_shape(name), hardware("H100").pcie_bandwidth_bytes_per_s
        ours_s = shape.weight_bytes / (num_gpus * link)
        yield PaperFigure(
            paper="Prism",
            figure="9",
            quantity=f"seconds to activate a model of {size} on {num_gpus} x H100",
            published=f"{published_s:g}{_BASELINES.get(size, '')}",
            ours=f"{ours_s:.2f}",
            why=name,
        )
    yield PaperFigure(
        paper="Prism",
        figure="9",
        quantity="seconds to activate a model of 8B, without mapping ahead",
        published="0.7",
        ours="0.34",
        why="measured on one H200, from pinned memory",
    )
    published = {
        "static": "51 % (MuxServe++); 39 % (S-partition)",
        "request-level": "45 % (QLM)",
        "gpupool": "99 %",
    }
    for policy, value in published.items():
        row = _eight_models(policy, workloads)
        if row is not None:
            yield PaperFigure(
                paper="Prism",
                figure="table 1",
                quantity=f"first tokens in time, 8 models on 2 x H100: {policy}",
                published=value,
                ours="refused" if "refused" in row else _share(row["ttft_attainment"]),
                why="",
            )


def _eight_models(policy: str, workloads: Path | None) -> RunRow | None:
    [panel] = preset_panels("arena27")
    try:
        panel = panel.changed(Overrides(workloads_dir=workloads))
    except UsageError:
        return None
    targets, shapes = Targets(1.0, 0.05), ("Llama-3.1-8B",)
    panel = replace(panel, box=Box(2, "H100"), targets=targets, shapes=shapes)
    return next(run_points([Point(panel, policy, 8, None)]))


def _tokenscale(rows: Sequence[RunRow], workloads: Path | None) -> Iterator[PaperFigure]:
    def figure(name: str, quantity: str, published: str, ours: str, why: str = "") -> PaperFigure:
        return PaperFigure(
            paper="TokenScale",
            figure=name,
            quantity=quantity,
            published=published,
            ours=ours,
            why=why,
        )

    latency = latency_for("A100-40", builtin_shape("Llama-3.1-8B"))
    tokens_per_s = prefill_velocity(1024, latency.prefill_s([1024]))
    yield figure("table I", "prompt tokens/s, Llama-3.1-8B", "14,000", f"{tokens_per_s:,.0f}")
    for name, published in _VELOCITIES.items():
        ours = [_decode_velocity(name, kind) for kind in _BUCKETS]
        ratios = sorted(mine / theirs for mine, theirs in zip(ours, published, strict=True))
        yield figure(
            "table II",
            f"decode tokens/s of {name}, 9 classes from 256-100 to 8192-610",
            f"{published[0]:,} to {published[-1]:,}",
            f"{ours[0]:,.0f} to {ours[-1]:,.0f}: {ratios[0]:.2f} to {ratios[-1]:.2f} of theirs",
        )
    rates = dict.fromkeys(_BUCKETS, 22 / len(_BUCKETS))
    velocities = dict(zip(_BUCKETS, map(float, _VELOCITIES["Llama-3.1-8B"]), strict=True))
    decoders = decoders_load(rates, velocities)
    yield figure(
        "VI-B1",
        "decoders for 22 requests/s of 9 classes, by equation 3",
        "",
        f"{decoders:.2f}",
        "the paper's velocities in its own equation, at the rate of the traces",
    )
    if (share := _burst_share(workloads)) is not None:
        yield figure(
            "2",
            "time in bursts, Azure conversations",
            "47 %, 2.3 s each",
            f"{100 * share[0]:.0f} %, {share[1]:.1f} s each",
            "seconds with more requests than the mean of the minute before",
        )
    for row in rows:
        if row["preset"] == "tokenscale-burst-converting":
            p99_s = row.get("burst_ttft_p99_s")
            yield figure(
                "10",
                "longest TTFT in the burst",
                "rivals: 1.2 to 2.3 s",
                "none" if p99_s is None else f"{p99_s:.2f} s (p99)",
                "the lengths are not published: prompts of 2,048, answers of 28 tokens",
            )


def _decode_velocity(name: str, kind: RequestClass) -> float:
    shape, num_gpus = builtin_shape(name), _DECODER_GPUS[name]
    latency = latency_for("A100-40", shape, num_gpus=num_gpus)
    room_bytes = num_gpus * hardware("A100-40").memory_bytes * USABLE_SHARE - shape.weight_bytes
    speed = Speed(costs_of(latency))
    return batch_velocity(speed, 0.1, kind, room_bytes / shape.kv_bytes_per_token)


def _burst_share(workloads: Path | None) -> tuple[float, float] | None:
    """Return the share of seconds in bursts, and the mean length of a burst in seconds."""
    [panel] = preset_panels("azure23-conv")
    try:
        panel = panel.changed(Overrides(workloads_dir=workloads))
        drawn = panel.workload.draw(Draw(None, None, None, 0))
    except UsageError:
        return None
    counts = [0] * (int(drawn.requests[-1].arrival_s) + 1)
    for one in drawn.requests:
        counts[int(one.arrival_s)] += 1
    in_burst = [
        count > sum(counts[at - 60 : at]) / 60 for at, count in enumerate(counts) if at >= 60
    ]
    begins = sum(
        now and not before for before, now in zip([False, *in_burst[:-1]], in_burst, strict=True)
    )
    return sum(in_burst) / len(in_burst), sum(in_burst) / max(1, begins)


def _aladdin(goodputs: Goodputs) -> Iterator[PaperFigure]:
    def figure(name: str, quantity: str, published: str, ours: str, why: str = "") -> PaperFigure:
        return PaperFigure(
            paper="Aladdin", figure=name, quantity=quantity, published=published, ours=ours, why=why
        )

    for model, gpu, num_gpus, card, tbt_s in (
        ("Llama-2-7B", "H800", 1, "A100", 0.015),
        ("Llama-2-13B", "H800", 1, "A100", 0.03),
        ("Llama-2-70B", "A100-80", 2, "", 0.075),
    ):
        rates = _group_rates(model, gpu, tbt_s)
        best = max(rates, key=lambda one: rates[one])
        measured = ", ".join(map(str, rates))
        why = f"only groups of {measured} are measured; of these {best} is best"
        yield figure(
            "table 1",
            f"GPUs per worker, {model} on {gpu}",
            f"{num_gpus} ({card}; V100: {_ON_V100[model]})" if card else str(num_gpus),
            str(best) if num_gpus in rates else "",
            "" if num_gpus in rates else why,
        )
    loads = goodputs.get("aladdin-fig10", {})
    fewer = "up to 40 % fewer GPUs, which is at most 1.67 x the load (against vLLM 71 % fewer)"
    policies = ("best-fit", "power-of-two", "gpupool")
    yield from _ratios(figure, "10", loads, "shortest-queue", fewer, policies)
    p99_s, num = _best_fit_p99_s()
    yield figure(
        "13",
        "placement of a request at 25 requests/s",
        "less than 50 ms",
        f"{1e3 * p99_s:.2f} ms (p99 of {num} decisions of the core)",
    )


def _group_rates(model: str, gpu: str, tbt_s: float) -> dict[int, float]:
    """Return tokens/s and GPU by size of group, for contexts of 500 tokens."""
    shape = builtin_shape(model)
    sizes = {one.num_gpus for one in measured_profiles() if (one.gpu, one.model) == (gpu, model)}
    rates = {}
    for num_gpus in sorted(sizes):
        room_bytes = int(num_gpus * hardware(gpu).memory_bytes * USABLE_SHARE) - shape.weight_bytes
        latency = latency_for(gpu, shape, num_gpus=num_gpus)
        rates[num_gpus] = group_throughput(
            latency, num_gpus, room_bytes, shape.kv_bytes_per_token, 500.0, tbt_s
        )
    return rates


def _best_fit_p99_s() -> tuple[float, int]:
    """Return the p99 of the core's decisions with ``best-fit``, and their number."""
    [panel] = preset_panels("aladdin-fig10")
    scenario = build_scenario(Point(panel, "best-fit", 1, 25.0))
    policy = make_policy("best-fit", PolicyOptions())
    box = panel.box
    simulation = Simulation(
        scenario.models, policy, [BoxDevice(box.device_bytes)] * box.num_devices
    )
    taken_s = decision_times_s(simulation, scenario.requests, 60.0)
    return percentile(taken_s, 0.99) or 0.0, len(taken_s)


def _percent(row: RunRow) -> str:
    return _share(row["attainment"])


def _share(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


def _load(best: Mapping[str, Any]) -> str:
    return f"{'at least ' if best['is_lower_bound'] else ''}{best['load']:.0f}"
