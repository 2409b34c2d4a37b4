"""Ten models of three sizes on one GPU under one policy, at a rising rate of requests.

Begins with a request per model every ten seconds, with ShareGPT lengths, and doubles the rate until
fewer than nine tokens in ten are in time. The device's memory is limited so that half of the
weights fit.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, arguments, setting_of
from benchmarks.gpu.synthetic import weights_of
from benchmarks.sim_devices import CappedLengths, Sent, send_all
from gpupool_cli.private_daemon import PrivateDaemon
from gpupoold.sim.workloads import equal_rates, poisson_workload
from gpupoold.stats.percentile import percentile

POLICIES = ("gpupool", "request-level")
# The largest first: beside the weights snapshots, host memory holds a checkpoint of one size.
_MIX = {"8B": 2, "3B": 3, "1B": 5}
_DRY_MIX = {"14B": 1, "3B": 2}
_DEVICE_BYTES = 32_000_000_000
_DRY_DEVICE_BYTES = 12 << 20
_KV_HOST_BYTES = 8 << 30
_DRY_KV_HOST_BYTES = 64 << 20
_LENGTHS = CappedLengths(2048, 256)
_DRY_LENGTHS = CappedLengths(64, 8)
_FIRST_RPS = 0.1
_NUM_RATES = 7
_SEED = 7
# Duration of the arrivals at a rate; the last answers end later.
_PHASE_S = 15.0
_DRY_PHASE_S = 3.0
_DRY_FACTOR = 10
_DRAIN_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Phase:
    """One rate, of all models together, and what came of it."""

    rate_rps: float
    requests: int
    tokens: int
    attainment: float
    errors: int
    ttft_p50_s: float | None
    moved_bytes: int


def run(setting: Setting, policy: str) -> None:
    """Measure and report rate by rate, until the policy misses too much or the time is over."""
    mix = _DRY_MIX if setting.is_dry else _MIX
    shapes = [shape for shape, count in mix.items() for _ in range(count)]
    with setting.daemon(_config(setting, policy, shapes), starts_quickly=True) as daemon:
        models = _add_models(setting, daemon, mix)
        phases: list[Phase] = []
        phase_s = _DRY_PHASE_S if setting.is_dry else _PHASE_S
        rate_rps = _FIRST_RPS * (_DRY_FACTOR if setting.is_dry else 1)
        while len(phases) < _NUM_RATES and setting.left_s > _DRAIN_FACTOR * phase_s:
            try:
                phases.append(asyncio.run(_phase(setting, daemon, models, rate_rps, phase_s)))
            except TimeoutError:
                break  # overloaded: the answers did not end in time, so the rate has no figures
            found = mixed_figures(policy, phases)
            setting.report.add(found, phases=[asdict(phase) for phase in phases])
            if phases[-1].attainment < figures.ATTAINMENT or setting.is_dry:
                break
            rate_rps *= 2


def mixed_figures(policy: str, phases: list[Phase]) -> dict[str, figures.Figure]:
    """Attainment at the first rate, and goodput, or what bounds it."""
    first = phases[0]
    found = {
        f"mixed_{policy}_attainment": figures.measured(first.attainment),
        f"mixed_{policy}_errors": figures.at_most(sum(phase.errors for phase in phases), 0),
    }
    attainments = {phase.rate_rps: phase.attainment for phase in phases}
    rate_rps = figures.goodput_rps(attainments)
    if rate_rps is not None:
        found[f"mixed_{policy}_goodput_rps"] = figures.measured(rate_rps)
    elif first.attainment < figures.ATTAINMENT:
        found[f"mixed_{policy}_goodput_at_most_rps"] = figures.measured(first.rate_rps)
    else:
        found[f"mixed_{policy}_goodput_at_least_rps"] = figures.measured(phases[-1].rate_rps)
    return found


def _config(setting: Setting, policy: str, shapes: list[str]) -> str:
    kv_host_bytes = _DRY_KV_HOST_BYTES if setting.is_dry else _KV_HOST_BYTES
    device_bytes = setting.dry_bytes(_DRY_DEVICE_BYTES) if setting.is_dry else _DEVICE_BYTES
    config = setting.device(device_bytes)
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes(shapes)}\n"
    return config + f'kv_host = {kv_host_bytes}\n[scheduling]\npolicy = "{policy}"\n'


def _add_models(setting: Setting, daemon: PrivateDaemon, mix: Mapping[str, int]) -> list[str]:
    models = []
    for shape, count in mix.items():
        path = setting.checkpoint(shape)
        for index in range(count):
            models.append(f"{shape}-{index}".lower())
            add_timed(setting, daemon, models[-1], path)
        weights_of(path).unlink()  # the weights snapshots suffice
    return models


async def _phase(
    setting: Setting, daemon: PrivateDaemon, models: list[str], rate_rps: float, phase_s: float
) -> Phase:
    lengths = _DRY_LENGTHS if setting.is_dry else _LENGTHS
    requests = poisson_workload(equal_rates(models, rate_rps), phase_s, lengths, _SEED)
    before = _counted(daemon)
    async with asyncio.timeout(max(1.0, setting.left_s)):
        sent: Sent = await send_all(daemon.http_url, requests, _SEED, 1.0)
    counted = {name: value - before[name] for name, value in _counted(daemon).items()}
    return Phase(
        rate_rps=rate_rps * len(models),
        requests=len(requests),
        tokens=counted["tokens"],
        attainment=counted["tokens_in_time"] / max(1, counted["tokens"]),
        errors=sent.errors.total(),
        ttft_p50_s=percentile(sent.ttfts_s, 0.5),
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
