"""Runs of points, sequential or parallel; the result of a run is a row."""

from __future__ import annotations

import functools
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NotRequired, TypedDict

from gpupoold.errors import UsageError
from gpupoold.sim.bound import attainment_bound
from gpupoold.sim.device import BoxDevice, on_nodes
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.metrics import Goodput, goodput, summarise
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.scenario import Axis, Point, Scenario, build_scenario, roles_text
from gpupoold.sim.workloads import SimRequest
from gpupoold.stats.histogram import percentile

# Called with the virtual time and the duration of the workload, in seconds.
OnProgress = Callable[[float, float], None]
# ``static`` keeps all models resident, so too many models for the memory is a result of the
# experiment, not a usage error.
_MAY_REFUSE = frozenset({"static"})


class RunRow(TypedDict):
    """The inputs and results of a run; None without a measurement."""

    preset: str
    policy: str
    axis: Axis
    devices: str
    tensor_parallel: int
    models: int
    rps: float
    ttft_s: float
    tbt_s: float
    seed: int
    roles: str
    kv_host_bytes: int
    model_cache_bytes: int
    requests: int
    finished: int
    attainment: float | None
    attainment_bound: float | None
    attainment_paper: float | None
    on_schedule: float | None
    ttft_attainment: float | None
    tbt_attainment: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p99_s: float | None
    switches: int
    busy_share: float
    switching_share: float
    disk_reads: int
    kv_drops: int
    wall_s: float
    num_preemptions: NotRequired[int]
    families: NotRequired[int]
    engine_loads: NotRequired[int]
    engine_takeovers: NotRequired[int]
    active_models_mean: NotRequired[float]
    burst_ttft_p50_s: NotRequired[float | None]
    burst_ttft_p99_s: NotRequired[float | None]
    refused: NotRequired[str]


def run_point(point: Point, on_progress: OnProgress | None = None) -> RunRow:
    """Run a point; return its row.

    Raises UsageError if the point cannot be simulated; the policy ``static`` refuses more models
    than fit.
    """
    return _run(build_scenario(point), on_progress)


def run_points(
    points: Sequence[Point],
    *,
    jobs: int = 1,
    on_progress: Callable[[int, float, float], None] | None = None,
) -> Iterator[RunRow]:
    """Yield the rows of several points in order, from up to ``jobs`` processes.

    If the policy ``static`` refuses the models, ``refused`` of the row has the reason, and the
    attainment is None. ``on_progress`` gets the point's index and the arguments of ``OnProgress``;
    with several processes ``on_progress`` is not called. Raises UsageError if ``jobs`` is less than
    one, or as for ``run_point``.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs: at least one is needed")
    if jobs > 1 and len(points) > 1:
        yield from _run_in_processes(points, min(jobs, len(points)))
        return
    for index, point in enumerate(points):
        report_progress = functools.partial(on_progress, index) if on_progress else None
        yield _run_or_refusal(point, report_progress)


def sweep_goodput(rows: Iterable[RunRow]) -> dict[tuple[str, str], Goodput | None]:
    """Return the load at 90 % attainment by (preset, policy), for presets that sweep a load.

    The load is a number of models or requests/s per model, by the row's ``axis``; None if the
    lowest load was too much. If the next load was refused, the last served load counts.
    """
    swept: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for row in rows:
        served = row["attainment"]
        swept.setdefault((row["preset"], row["policy"]), []).append((row[row["axis"]], served))
    return {key: _goodput(loads) for key, loads in swept.items() if len(loads) > 1}


def mean_active_models(
    requests: Iterable[SimRequest], service_s: float, duration_s: float
) -> float:
    """Return the mean number of models in use, if each request took ``service_s`` seconds.

    The mean is over the time from ``service_s``, when the empty start no longer matters, to
    ``duration_s``.
    """
    from_s = min(service_s, duration_s / 2)
    until_s: dict[str, float] = {}
    busy_s = 0.0
    for request in requests:
        begin_s = max(request.arrival_s, until_s.get(request.model, from_s), from_s)
        end_s = min(request.arrival_s + service_s, duration_s)
        busy_s += max(0.0, end_s - begin_s)
        until_s[request.model] = max(end_s, until_s.get(request.model, from_s))
    return busy_s / (duration_s - from_s)


def _goodput(loads: Sequence[tuple[float, float | None]]) -> Goodput | None:
    served = [(load, attained) for load, attained in loads if attained is not None]
    best = goodput(served) if served else None
    if best is not None and best.is_lower_bound and max(loads)[0] > best.load:
        return Goodput(best.load, is_lower_bound=False)
    return best


def _run_in_processes(points: Sequence[Point], jobs: int) -> Iterator[RunRow]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_die_at_interrupt)
    # Ctrl-C sends SIGINT to the whole process group. Children inherit the blocked signal until
    # ``_die_at_interrupt`` has set the default action, which ends a child without a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        rows = [pool.submit(_run_or_refusal, point) for point in points]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        for row in rows:
            yield row.result()
    except BaseException:
        # The remaining runs are not cancelled: when the children end, the pool's own thread sets
        # an exception on every pending future, which raises for a cancelled future.
        pool.shutdown(wait=False)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def _die_at_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run_or_refusal(point: Point, on_progress: OnProgress | None = None) -> RunRow:
    scenario = build_scenario(point)
    try:
        return _run(scenario, on_progress)
    except UsageError as error:
        if point.policy not in _MAY_REFUSE:
            raise
        return _row(scenario, SimOutcome((), (), scenario.end_s), 0.0) | {"refused": error.message}


def _run(scenario: Scenario, on_progress: OnProgress | None) -> RunRow:
    point, panel = scenario.point, scenario.point.panel
    host = panel.host
    device = BoxDevice(
        panel.box.device_bytes,
        kv_host_bytes=host.kv_bytes_per_gpu * panel.box.tensor_parallel_size,
        prefetches=point.policy not in panel.without_prefetch,
        switch_overhead_s=panel.switch_overhead_s,
    )
    simulation = Simulation(
        scenario.models,
        make_policy(
            point.policy,
            PolicyOptions(panel.num_prefill, converts_decoders=panel.converts_decoders),
        ),
        on_nodes([device] * panel.box.num_devices, scenario.models, panel.host_wishes.far_share),
        roles=panel.device_roles,
        host=host,
        engines=panel.engines,
        prefix_bytes=panel.host_wishes.prefix_cache_bytes,
    )
    duration_s = scenario.duration_s
    report_progress = (lambda at_s: on_progress(at_s, duration_s)) if on_progress else None
    started_s = time.perf_counter()
    outcome = simulation.run(
        scenario.requests, scenario.end_s, report_progress, counted_until_s=duration_s
    )
    return _row(scenario, outcome, time.perf_counter() - started_s)


def _row(scenario: Scenario, outcome: SimOutcome, wall_s: float) -> RunRow:
    point, panel = scenario.point, scenario.point.panel
    overall = summarise(outcome.results, outcome.end_s).overall
    devices, num_models = outcome.devices, len(scenario.models)
    available_s = panel.box.num_devices * scenario.duration_s
    bound = attainment_bound(scenario.requests, scenario.models, panel.box.num_devices)
    rps = point.rps or len(scenario.requests) / scenario.duration_s / num_models
    row: RunRow = {
        "preset": point.preset,
        "policy": point.policy,
        "axis": panel.axis,
        "devices": panel.box.name,
        "tensor_parallel": panel.box.tensor_parallel_size,
        "models": num_models,
        "rps": round(rps, 6),
        "ttft_s": panel.targets.ttft_s,
        "tbt_s": panel.targets.tbt_s,
        "seed": panel.seed,
        "roles": roles_text(panel.roles),
        "kv_host_bytes": panel.host.kv_bytes_per_gpu,
        "model_cache_bytes": panel.host.model_cache_bytes,
        "requests": len(scenario.requests),
        "finished": overall.num_finished,
        "attainment": overall.attainment,
        "attainment_bound": bound,
        "attainment_paper": overall.artifact,
        "on_schedule": overall.on_schedule,
        "ttft_attainment": overall.first_in_time,
        "tbt_attainment": overall.gaps_in_time,
        "ttft_p50_s": overall.ttft_s.p50,
        "ttft_p99_s": overall.ttft_s.p99,
        "tbt_p99_s": overall.tbt_s.p99,
        "switches": sum(device.switches for device in devices),
        "busy_share": sum(device.busy_s for device in devices) / available_s,
        "switching_share": sum(device.switch_s for device in devices) / available_s,
        "disk_reads": outcome.num_reads,
        "kv_drops": outcome.num_dropped,
        "wall_s": wall_s,
    }
    if outcome.num_preemptions:
        row["num_preemptions"] = outcome.num_preemptions
    if panel.engines is not None:
        row["engine_loads"] = outcome.num_loads
        row["engine_takeovers"] = outcome.num_bound
    if panel.num_families is not None:
        row["families"] = panel.num_families
    if (service_s := panel.service_s) is not None:
        active = mean_active_models(scenario.requests, service_s, scenario.duration_s)
        row["active_models_mean"] = active
    if (burst_s := panel.burst_s) is not None:
        ttfts_s = sorted(_ttfts_s(outcome, *burst_s))
        row["burst_ttft_p50_s"] = percentile(ttfts_s, 0.5)
        row["burst_ttft_p99_s"] = percentile(ttfts_s, 0.99)
    return row


def _ttfts_s(outcome: SimOutcome, from_s: float, until_s: float) -> Iterator[float]:
    """Yield the TTFT of each request that arrived in between; infinite without a token."""
    for result in outcome.results:
        arrival_s, times_s = result.request.arrival_s, result.token_times_s
        if from_s <= arrival_s < until_s:
            yield times_s[0] - arrival_s if times_s else math.inf
