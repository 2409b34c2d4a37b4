"""Ten models on one GPU under one policy, with a recorded trace at increasing speed.

The models have the dimensions of an 8B model with FP8 weights; the device's memory is limited so
that half of the weights fit. The arrivals, models and lengths are those of a real trace of 27
models, folded onto ten (``arena27_first5min.csv.gz``; the README of ``benchmarks/results`` has the
source). Each phase replays the next part of the trace at a higher speed. At the end the simulator
runs the same arrivals with the latencies that the daemon has measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, arguments, setting_of
from benchmarks.private_daemon import PrivateDaemon
from benchmarks.sim_devices import Sent, send_all
from gpupoold.domain import Targets
from gpupoold.errors import Failed
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.lengths import read_table
from gpupoold.sim.metrics import summarise
from gpupoold.sim.policies import make_policy
from gpupoold.sim.traces import fold_models, trace_requests
from gpupoold.sim.workloads import SimRequest, model_names
from gpupoold.stats.histogram import percentile

POLICIES = ("gpupool", "request-level")
_TRACE = Path(__file__).with_name("arena27_first5min.csv.gz")
_SHAPE = "8B-FP8"
_NUM_MODELS, _DRY_NUM_MODELS = 10, 3
_DEVICE_BYTES, _DRY_DEVICE_BYTES = 48_000_000_000, 12 << 20
_KV_HOST_BYTES, _DRY_KV_HOST_BYTES = 4 << 30, 64 << 20
# Caps on the tokens of prompts and answers.
_CAPS, _DRY_CAPS = (2048, 256), (64, 8)
_TARGETS = Targets(3.0, 0.05)
_SPEEDS, _DRY_SPEEDS = (3.0, 6.0, 12.0), (2.0,)
# Duration of the arrivals of a phase; the last answers end later.
_PHASE_S, _DRY_PHASE_S = 14.0, 3.0
# A phase begins only with this multiple of its duration left.
_DRAIN_FACTOR = 2.5
_ANSWERS_S = 600.0
_SEED = 7


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the trace at one speed, and what came of it.

    ``started_s`` is the time since the start of the first phase.
    """

    rate_rps: float
    started_s: float
    requests: int
    tokens: int
    attainment: float
    errors: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    moved_bytes: int


def run(setting: Setting, policy: str) -> None:
    """Measure and report phase by phase, then simulate the same phases."""
    parts = phases_of(trace(setting), *_speeds(setting))
    with setting.daemon(_config(setting, policy), starts_quickly=True) as daemon:
        _add_models(setting, daemon)
        done: list[Phase] = []
        began_s = time.monotonic()
        for requests in parts:
            if setting.left_s < _DRAIN_FACTOR * _speeds(setting)[1]:
                break
            started_s = time.monotonic() - began_s
            try:
                done.append(asyncio.run(_phase(setting, daemon, requests, started_s)))
            except TimeoutError:
                break  # overloaded: the answers did not end in time, so the phase has no figures
            rows = [asdict(phase) for phase in done]
            setting.report.add(mixed_figures(policy, done), phases=rows, **_stages(daemon))
        models, device_bytes = sim_models(daemon), _device_bytes(daemon)
    if not models:
        raise Failed("no model has measured latencies, so nothing can be simulated")
    simulated = simulate(models, device_bytes, _kv_host_bytes(setting), policy, done, parts)
    setting.report.add(simulated_figures(policy, done, simulated), simulated=simulated)


def trace(setting: Setting) -> tuple[SimRequest, ...]:
    """The recorded requests, folded onto the models, none longer than the caps."""
    max_prompt, max_output = _DRY_CAPS if setting.is_dry else _CAPS
    requests = fold_models(trace_requests(read_table(_TRACE)), _num_models(setting))
    return tuple(
        replace(
            one,
            prompt_tokens=min(one.prompt_tokens, max_prompt),
            output_tokens=min(one.output_tokens, max_output),
        )
        for one in requests
    )


def phases_of(
    requests: Sequence[SimRequest], speeds: Sequence[float], phase_s: float
) -> list[tuple[SimRequest, ...]]:
    """Parts of the trace that follow each other, each as long as ``phase_s`` at its speed.

    Arrivals count from the start of the part.
    """
    parts, from_s = [], 0.0
    for speed in speeds:
        until_s = from_s + phase_s * speed
        inside = [one for one in requests if from_s <= one.arrival_s < until_s]
        parts.append(
            tuple(replace(one, arrival_s=(one.arrival_s - from_s) / speed) for one in inside)
        )
        from_s = until_s
    return parts


def mixed_figures(policy: str, phases: Sequence[Phase]) -> dict[str, figures.Figure]:
    """Attainment of each phase, and goodput, or what bounds it."""
    first = phases[0]
    found = {
        f"mixed_{policy}_at_{phase.rate_rps:.3g}_rps_attainment": figures.measured(phase.attainment)
        for phase in phases
    }
    found[f"mixed_{policy}_attainment"] = figures.measured(_overall(phases))
    errors = sum(phase.errors for phase in phases)
    found[f"mixed_{policy}_errors"] = figures.at_most(errors, 0)
    attainments = {phase.rate_rps: phase.attainment for phase in phases}
    rate_rps = figures.goodput_rps(attainments)
    if rate_rps is not None:
        found[f"mixed_{policy}_goodput_rps"] = figures.measured(rate_rps)
    elif first.attainment < figures.ATTAINMENT:
        found[f"mixed_{policy}_goodput_at_most_rps"] = figures.measured(first.rate_rps)
    else:
        found[f"mixed_{policy}_goodput_at_least_rps"] = figures.measured(phases[-1].rate_rps)
    return found


def simulated_figures(
    policy: str, phases: Sequence[Phase], simulated: Sequence[float]
) -> dict[str, figures.Figure]:
    """The largest difference of a phase's attainment from the simulator's."""
    pairs = zip(phases, simulated, strict=True)
    difference = max(abs(phase.attainment - share) for phase, share in pairs)
    name = f"mixed_{policy}_simulated_difference"
    return {name: figures.at_most(difference, figures.SIMULATED_DIFFERENCE)}


def simulate(
    models: dict[str, SimModel],
    device_bytes: int,
    kv_host_bytes: int,
    policy: str,
    phases: Sequence[Phase],
    parts: Sequence[Sequence[SimRequest]],
) -> list[float]:
    """The simulator's attainment in each phase, on the same arrivals."""
    requests = [
        replace(one, id=f"{index}-{one.id}", arrival_s=one.arrival_s + phase.started_s)
        for index, (phase, part) in enumerate(zip(phases, parts, strict=False))
        for one in part
    ]
    end_s = requests[-1].arrival_s + _ANSWERS_S
    simulation = Simulation(
        models, make_policy(policy), [BoxDevice(device_bytes, kv_host_bytes=kv_host_bytes)]
    )
    results = simulation.run(requests, end_s).results
    return [
        summarise(
            [one for one in results if one.request.id.startswith(f"{index}-")], end_s
        ).overall.attainment
        or 0.0
        for index in range(len(phases))
    ]


def sim_models(daemon: PrivateDaemon) -> dict[str, SimModel]:
    """The models with the latencies that the daemon has measured."""
    with daemon.client() as client:
        found = client.models()
    models: dict[str, SimModel] = {}
    for info in found:
        latency = None if info.latency is None else info.latency.model()
        if latency is not None:
            targets = Targets(info.ttft_s, info.tbt_s)
            sizes = info.weight_bytes, info.kv_bytes_per_token
            models[info.name] = SimModel(info.name, targets, latency, *sizes)
    return models


def _overall(phases: Sequence[Phase]) -> float:
    tokens = sum(phase.tokens for phase in phases)
    return sum(phase.attainment * phase.tokens for phase in phases) / max(1, tokens)


def _num_models(setting: Setting) -> int:
    return _DRY_NUM_MODELS if setting.is_dry else _NUM_MODELS


def _speeds(setting: Setting) -> tuple[tuple[float, ...], float]:
    return (_DRY_SPEEDS, _DRY_PHASE_S) if setting.is_dry else (_SPEEDS, _PHASE_S)


def _kv_host_bytes(setting: Setting) -> int:
    return _DRY_KV_HOST_BYTES if setting.is_dry else _KV_HOST_BYTES


def _device_bytes(daemon: PrivateDaemon) -> int:
    with daemon.client() as client:
        return client.ps().devices[0].device_bytes


def _config(setting: Setting, policy: str) -> str:
    device_bytes = setting.dry_bytes(_DRY_DEVICE_BYTES) if setting.is_dry else _DEVICE_BYTES
    config = setting.device(device_bytes)
    shapes = [_SHAPE] * _num_models(setting)
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes(shapes)}\n"
    return config + f'kv_host = {_kv_host_bytes(setting)}\n[scheduling]\npolicy = "{policy}"\n'


def _add_models(setting: Setting, daemon: PrivateDaemon) -> None:
    path = setting.checkpoint(_SHAPE)
    for name in model_names(_num_models(setting)):
        add_timed(setting, daemon, name, path, targets=_TARGETS)


def _stages(daemon: PrivateDaemon) -> dict[str, Any]:
    """Latency by stage and model since the start, and all switches with their stages."""
    with daemon.client() as client:
        spans, switches = client.history_by_model(), client.switches(10_000)
        models, devices = client.models(), client.ps().devices
    return {
        "stages": [asdict(one) for one in spans],
        "switches": [asdict(one) for one in switches],
        "latencies": {one.name: _plain(one.latency) for one in models},
        "devices": [one.model_dump(mode="json") for one in devices],
    }


def _plain(latency: Any) -> Any:
    return None if latency is None else asdict(latency)


async def _phase(
    setting: Setting, daemon: PrivateDaemon, requests: Sequence[SimRequest], started_s: float
) -> Phase:
    before = _counted(daemon)
    async with asyncio.timeout(max(1.0, setting.left_s)):
        sent: Sent = await send_all(daemon.http_url, requests, _SEED, 1.0)
    counted = {name: value - before[name] for name, value in _counted(daemon).items()}
    return Phase(
        rate_rps=len(requests) / _speeds(setting)[1],
        started_s=started_s,
        requests=len(requests),
        tokens=counted["tokens"],
        attainment=counted["tokens_in_time"] / max(1, counted["tokens"]),
        errors=sent.errors.total(),
        ttft_p50_s=percentile(sent.ttfts_s, 0.5),
        ttft_p99_s=percentile(sent.ttfts_s, 0.99),
        moved_bytes=counted["moved_bytes"],
    )


def _counted(daemon: PrivateDaemon) -> dict[str, Any]:
    """What the daemon has counted since its start."""
    with daemon.client() as client:
        now = client.ps()
    return {
        "tokens": sum(model.tokens for model in now.models),
        "tokens_in_time": sum(model.tokens_in_time for model in now.models),
        "moved_bytes": now.switched_bytes,
    }


def main() -> int:
    """Run it; see the module."""
    parser = arguments(__doc__)
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0])
    args = parser.parse_args()
    run(setting_of(args), args.policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
