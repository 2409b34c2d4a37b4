"""All figures of the scheduler: ``make bench-sim`` writes ``build/bench-sim.json``.

Runs the paper's figures, the recorded workloads and the sweep of random boxes with all policies,
and compares the results with the requirements. A policy is not run at larger loads once its
attainment has fallen below half. With ``--plots DIR`` also draws the figures.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
import timeit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.decision_times import decision_times_s
from benchmarks.papers import paper_figures
from benchmarks.sweep import BETTER_BY, NUM_DRAWS, shown_losses, summary, sweep
from gpupool_cli.planning.plot import save_plot
from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.host import ENGINE_BYTES, HostWishes
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.policies import POLICY_NAMES, PolicyOptions, make_policy
from gpupoold.sim.presets import preset_panels
from gpupoold.sim.run import RunRow, run_point, run_points, sweep_goodput
from gpupoold.sim.scenario import FigurePanel, Overrides, Point
from gpupoold.sim.workloads import equal_rates, poisson_workload
from gpupoold.stats.histogram import percentile

FIGURES = (
    "aegaeon-fig4",
    "aegaeon-fig6",
    "aegaeon-fig11",
    "aegaeon-fig12",
    "aegaeon-fig13",
    "aegaeon-fig17-left",
    "aegaeon-fig17-right",
)
OTHERS = ("small-box", "prism-overload", "tokenscale-burst", "aladdin-fig10")
RECORDED = ("real-traces", "aegaeon-synth")
# Required ratio of gpupool's 90 % goodput to aegaeon's, for each figure.
RATIOS = {
    "aegaeon-fig11a": 2.0,
    "aegaeon-fig11b": 1.5,
    "aegaeon-fig11c": 1.5,
    "aegaeon-fig12-ix2": 1.5,
    "aegaeon-fig12-ox2": 1.5,
    "aegaeon-fig13a": 1.5,
    "aegaeon-fig13b": 1.5,
    "aegaeon-fig13c": 1.5,
    "aegaeon-fig17-a10": 1.5,
}
# Results of the simulator of the paper's authors: token attainment, and the authors' metric.
ARTIFACT = {40: (1.0, 1.0), 60: (0.975, 0.964), 70: (0.909, 0.898)}
# Least attainment of seven models on four A10, in the mean of so many draws.
SMALL_BOX, _NUM_SMALL_BOX_DRAWS = 0.95, 4
# Required share of first tokens in time of one overloaded model, by requests/s.
OVERLOAD = {6.0: 0.9, 7.0: 0.75, 8.0: 0.65}
SLOW_SWITCH, SLOW_SWITCH_S = "aegaeon-fig11a-slow-switch", 3.0
OWN_ENGINES, SHARED_ENGINES = "aegaeon-fig11a-own-engines", "aegaeon-fig11a-shared-engines"
_NUM_FAMILIES = 8
# Memory for eight engines on a GPU.
_ENGINES_BYTES = 2_500_000_000
# A number of models of figure 11a that must be served.
_NUM_FIG11A = 140
_EXPIRED = 0.5
_NUM_SPEED_RUNS = 5


def main() -> int:
    """Run everything, or the presets of ``--only``; exit code 1 when a figure was missed."""
    arguments = _parse()
    started_s = time.perf_counter()
    panels = list(_panels(arguments.workloads, arguments.only))
    tasks = [
        replace(panel, policies=(name,))
        for panel in panels
        for name in panel.policies
        if name in (arguments.policies or panel.policies)
    ]
    is_part = bool(arguments.only or arguments.policies)
    kept = _rows_of(arguments.out) if is_part else []
    drawn = _rows_of(arguments.out, "sweep_rows") if is_part else []
    again = {(task.name, task.policies[0]) for task in tasks}
    rows = [row for row in kept if (row["preset"], row["policy"]) not in again]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for more in _run(tasks, arguments.jobs, _known(arguments.reuse)):
        rows += more
        # What was measured so far can be kept by another run with ``--only``.
        arguments.out.write_text(json.dumps({"rows": rows, "sweep_rows": drawn}) + "\n")
    rows.sort(key=_place)
    if not is_part:
        drawn = list(itertools.chain.from_iterable(sweep(range(NUM_DRAWS), arguments.jobs)))
    figures, goodputs = [*_figures(rows), *_sweep_figures(drawn), *_speed()], _goodputs(rows)
    report = {
        "figures": figures,
        "goodput": goodputs,
        "papers": paper_figures(rows, goodputs, arguments.workloads),
        "below_another_policy": _losses(rows),
        "sweep": summary(drawn),
        "sweep_losses": shown_losses(drawn),
        "sweep_rows": drawn,
        "rows": rows,
        "wall_s": time.perf_counter() - started_s,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plots is not None:
        _plot(rows, panels, arguments.plots)
    for line in shown_losses(drawn):
        print(line)
    for figure in figures:
        print("{figure}: asked {asked}, measured {measured}{mark}".format_map(_shown(figure)))
    return 0 if all(figure["reached"] for figure in figures) else 1


def _panels(workloads: Path | None, only: Sequence[str] = ()) -> Iterator[FigurePanel]:
    """The figures' panels; the recorded ones too, where the recordings are there."""
    variants = _variants()
    names = only or (*FIGURES, *OTHERS, *RECORDED, *variants)
    for name in names:
        for panel in [variants[name]] if name in variants else preset_panels(name):
            try:
                yield panel.changed(Overrides(workloads_dir=workloads))
            except UsageError as error:
                print(f"{panel.name} left out: {error}", file=sys.stderr)


def _place(row: RunRow) -> tuple[int, int]:
    """Return the place of a row in the report: by preset and policy; points keep their order."""
    names = [panel.name for name in (*FIGURES, *OTHERS, *RECORDED) for panel in preset_panels(name)]
    preset, policy = row["preset"], row["policy"]
    return names.index(preset) if preset in names else len(names), POLICY_NAMES.index(policy)


def _variants() -> dict[str, FigurePanel]:
    """Figure 11a with seconds more per load of weights for the rival, and with engines counted."""
    [panel] = preset_panels("aegaeon-fig11a")
    slow = replace(panel, policies=("request-level",), switch_overhead_s=SLOW_SWITCH_S)
    own = replace(
        panel,
        policies=("gpupool", "aegaeon", "request-level"),
        host_wishes=HostWishes(engine_bytes=ENGINE_BYTES, engines_bytes=_ENGINES_BYTES),
    )
    shared = replace(own, num_families=_NUM_FAMILIES)
    named = {SLOW_SWITCH: slow, OWN_ENGINES: own, SHARED_ENGINES: shared}
    return {name: replace(panel, name=name) for name, panel in named.items()}


def _rows_of(report: Path, key: str = "rows") -> list[RunRow]:
    """Rows of an earlier run, none without its report."""
    if not report.exists():
        return []
    rows: list[RunRow] = json.loads(report.read_text()).get(key, [])
    return rows


def _known(report: Path | None) -> list[RunRow]:
    """The baselines' rows of an earlier run; they change less often than gpupool.

    ``static`` orders its turns as gpupool does, so it is run again too.
    """
    rows = [] if report is None else _rows_of(report)
    return [row for row in rows if row["policy"] not in ("gpupool", "static")]


def _is_of(row: RunRow, point: Point) -> bool:
    """Return whether a row is this point's; a recorded workload may bring its own models and
    rate."""
    return (
        (row["preset"], row["policy"]) == (point.preset, point.policy)
        and point.num_models in (None, row["models"])
        and point.rps in (None, row["rps"])
    )


def _run(
    tasks: Sequence[FigurePanel], jobs: int, known: Sequence[RunRow] = ()
) -> Iterator[list[RunRow]]:
    """Yield the rows of each task as soon as they are there."""
    context = multiprocessing.get_context("spawn")
    sweep = functools.partial(_sweep, known=known)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = {pool.submit(sweep, task): task for task in tasks}
        for future in as_completed(running):
            task, rows = running[future], future.result()
            print(f"{task.name} {task.policies[0]}: {len(rows)} points", file=sys.stderr)
            yield rows


def _sweep(panel: FigurePanel, known: Sequence[RunRow]) -> list[RunRow]:
    """One policy's points in order of load, as long as it keeps half of its promises."""
    rows: list[RunRow] = []
    for point in panel.points():
        row = next((row for row in known if _is_of(row, point)), None)
        row = row or next(iter(run_points([point])))
        rows.append(row)
        attainment = row["attainment"]
        if attainment is None or attainment < _EXPIRED:
            break
    return rows


def _figures(rows: Sequence[RunRow]) -> Iterator[dict[str, Any]]:
    """Required figures; without those whose rows are not there."""
    best = {key: load.load if load else 0.0 for key, load in sweep_goodput(rows).items()}
    by_point = {(row["preset"], row["policy"], row["models"]): row for row in rows}
    if (aegaeon := best.get(("aegaeon-fig11a", "aegaeon"))) is not None:
        yield _figure("aegaeon, fig 11a: models at 90 %", "65 to 80", aegaeon, 65 <= aegaeon <= 80)
    for models, (attainment, paper) in ARTIFACT.items():
        if (row := by_point.get(("aegaeon-fig11a", "aegaeon", models))) is not None:
            ours = row["attainment"] or 0.0, row["attainment_paper"] or 0.0
            near = max(abs(ours[0] - attainment), abs(ours[1] - paper)) <= 0.04
            asked = f"{attainment:.3f} / {paper:.3f}, within 0.04"
            name = f"aegaeon against its authors' simulator, {models} models"
            yield _figure(name, asked, f"{ours[0]:.3f} / {ours[1]:.3f}", near)
    wanted_ratios = [(preset, "aegaeon", wanted) for preset, wanted in RATIOS.items()]
    for preset, rival, wanted in [*wanted_ratios, ("aegaeon-fig11a", "request-level", 2.0)]:
        if best.get((preset, rival)) and (preset, "gpupool") in best:
            ratio = best[preset, "gpupool"] / best[preset, rival]
            yield _figure(f"{preset}: goodput over {rival}'s", wanted, ratio, ratio >= wanted)
    yield from _own_figures(rows, best)
    losses = _losses(rows)
    yield _figure("points where another policy does better", 0, len(losses), not losses)
    if (num_models := best.get((SLOW_SWITCH, "request-level"))) is not None:
        name = f"request-level with {SLOW_SWITCH_S:g} s more per load: models at 90 %"
        yield _figure(name, "to be reported", num_models, True)


def _sweep_figures(rows: Sequence[RunRow]) -> Iterator[dict[str, Any]]:
    for half in summary(rows):
        name = f"draws {half['draws']} where another policy does better, of {half['num_draws']}"
        yield _figure(name, 0, half["num_losses"], not half["num_losses"])


def _own_figures(
    rows: Sequence[RunRow], best: Mapping[tuple[str, str], float]
) -> Iterator[dict[str, Any]]:
    """Required figures of the default policy alone."""
    if (load := best.get(("aegaeon-fig11a", "gpupool"))) is not None:
        yield _figure("gpupool, fig 11a: models at 90 %", 165, load, load >= 165)
    for row in rows:
        if row["policy"] != "gpupool":
            continue
        if row["preset"] == "aegaeon-fig11a" and row["models"] == _NUM_FIG11A:
            share = row["attainment"] or 0.0
            yield _figure(f"gpupool, fig 11a: {_NUM_FIG11A} models", 0.995, share, share >= 0.995)
        if row["preset"] == "prism-overload" and row["rps"] in OVERLOAD:
            least, share = OVERLOAD[row["rps"]], row["ttft_attainment"] or 0.0
            name = f"prism-overload: first tokens in time at {row['rps']:g} requests/s"
            yield _figure(name, least, share, share >= least)
    for name, what in ((OWN_ENGINES, "an engine per model"), (SHARED_ENGINES, "8 families")):
        if (load := best.get((name, "gpupool"))) is not None:
            yield _figure(f"gpupool, fig 11a with {what}: models at 90 %", "reported", load, True)
    mean = _small_box_mean()
    name = f"small-box: mean of {_NUM_SMALL_BOX_DRAWS} draws"
    yield _figure(name, SMALL_BOX, mean, mean >= SMALL_BOX)


def _small_box_mean() -> float:
    [panel] = preset_panels("small-box")
    draws = [replace(panel, seed=seed) for seed in range(_NUM_SMALL_BOX_DRAWS)]
    rows = [run_point(Point(draw, "gpupool", None, None)) for draw in draws]
    return sum(row["attainment"] or 0.0 for row in rows) / len(rows)


def _losses(rows: Iterable[RunRow]) -> list[dict[str, Any]]:
    """Points at which another policy kept more of its promises."""
    points: dict[tuple[str, int, float], dict[str, float]] = {}
    for row in rows:
        if row["attainment"] is not None:
            point = points.setdefault((row["preset"], row["models"], row["rps"]), {})
            point[row["policy"]] = row["attainment"]
    return [
        {"preset": preset, "models": models, "rps": rps, "gpupool": point["gpupool"], name: other}
        for (preset, models, rps), point in points.items()
        for name, other in point.items()
        if other > point.get("gpupool", 1.0) + BETTER_BY
    ]


def _speed() -> Iterator[dict[str, Any]]:
    """The fastest of some runs each, since machines are noisy, and how fast this one is.

    The runs make the same decisions, so each decision counts with its fastest run.
    """
    point = Point(preset_panels("aegaeon-fig11a")[0], "gpupool", 70, 0.1)
    wall_s = min(run_point(point)["wall_s"] for _ in range(_NUM_SPEED_RUNS))
    yield _figure("10 min of fig 11a at 70 models, one core, s", 5.0, wall_s, wall_s < 5.0)
    runs = [_decision_times_s() for _ in range(_NUM_SPEED_RUNS)]
    fastest_s = [min(taken_s) for taken_s in zip(*runs, strict=True)]
    p99_us = _p99_us(fastest_s)
    name = f"a decision at 100 models and 1,000 live requests, p99 of {len(fastest_s)}, us"
    yield _figure(name, 200, p99_us, p99_us < 200)
    slowest_us = max(map(_p99_us, runs))
    yield _figure(
        "the same in the slowest run, with the machine's noise, us", "none", slowest_us, True
    )
    yield _figure("for comparison: an empty Python call here, ns", "none", _empty_call_ns(), True)


def _p99_us(taken_s: Sequence[float]) -> float:
    return 1e6 * (percentile(taken_s, 0.99) or 0.0)


def _empty_call_ns() -> float:
    def nothing() -> None:
        pass

    return min(timeit.repeat(nothing, number=100_000, repeat=10)) / 100_000 * 1e9


def _decision_times_s() -> list[float]:
    """Return the times of all calls of the core while 900 to 1,100 requests are live."""
    box = parse_box("16xH800")
    models = box_models(box, 100, Targets())
    requests = poisson_workload(equal_rates(list(models), 0.37), 120.0, sharegpt_lengths(), 0)
    simulation = Simulation(
        models,
        make_policy("gpupool", PolicyOptions()),
        [BoxDevice(box.device_bytes)] * box.num_devices,
    )
    return decision_times_s(
        simulation, requests, 120.0, lambda state: 900 <= len(state.requests) <= 1100
    )


def _goodputs(rows: Sequence[RunRow]) -> dict[str, dict[str, Any]]:
    loads: dict[str, dict[str, Any]] = {}
    for (preset, policy), best in sweep_goodput(rows).items():
        loads.setdefault(preset, {})[policy] = (
            None if best is None else {"load": best.load, "is_lower_bound": best.is_lower_bound}
        )
    return loads


def _figure(name: str, asked: object, measured: object, reached: bool) -> dict[str, Any]:
    return {"figure": name, "asked": asked, "measured": measured, "reached": reached}


def _shown(figure: Mapping[str, Any]) -> dict[str, Any]:
    measured = figure["measured"]
    text = f"{measured:.4g}" if isinstance(measured, float) else str(measured)
    return {**figure, "measured": text, "mark": "" if figure["reached"] else "  MISSED"}


def _plot(rows: Sequence[RunRow], panels: Sequence[FigurePanel], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    titles = {panel.name: panel.title for panel in panels}
    for name in (*FIGURES[2:], "real-traces"):
        shown = {panel.name for panel in preset_panels(name)}
        chosen = [row for row in rows if row["preset"] in shown]
        if chosen:
            save_plot(chosen, titles, folder / f"{name}.svg")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/bench-sim.json"))
    parser.add_argument("--plots", type=Path, help="draw the figures there")
    for option, what in (("--only", "presets"), ("--policies", "policies")):
        parser.add_argument(
            option,
            type=lambda text: tuple(text.split(",")),
            default=(),
            help=f"run these {what} again, and keep the other rows of the report",
        )
    parser.add_argument("--reuse", type=Path, help="take the baselines from this earlier report")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    default = os.environ.get("GPUPOOL_WORKLOADS")
    parser.add_argument(
        "--workloads",
        type=Path,
        default=Path(default) if default else None,
        help="folder of recorded workloads (default: GPUPOOL_WORKLOADS)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
