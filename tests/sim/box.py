"""Boxes whose times can be worked out by hand: steps and copies that take round numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpupoold.domain import Targets
from gpupoold.latency.models import LatencyModel, LinearDecode, LinearPrefill, SwitchModel
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.workloads import SimRequest

GB = 10**9


def latency(
    step_s: float = 0.01,
    bandwidth_gb_per_s: float = 10,
    prefill_s: float = 0.01,
    sequence_s: float = 0.0,
) -> LatencyModel:
    """A prefill takes ``prefill_s`` and 0.1 ms a token, a step the same for any context."""
    return LatencyModel(
        prefill=LinearPrefill(token_s=1e-4, base_s=prefill_s),
        decode=LinearDecode(base_s=step_s, sequence_s=sequence_s),
        switch=SwitchModel(bandwidth_gb_per_s * GB),
    )


def models(
    names: Iterable[str],
    weight_gb: float = 10,
    *,
    kv_bytes_per_token: int = 100_000,
    targets: Targets | None = None,
    speed: LatencyModel | None = None,
) -> dict[str, SimModel]:
    """Equal models."""
    targets, speed = targets or Targets(10.0, 0.1), speed or latency()
    weight_bytes = int(weight_gb * GB)
    return {
        name: SimModel(name, targets, speed, weight_bytes, kv_bytes_per_token) for name in names
    }


def request(
    model: str,
    arrival_s: float = 0.0,
    *,
    request_id: str = "",
    prompt_tokens: int = 100,
    output_tokens: int = 10,
) -> SimRequest:
    """A request, named after its model if not otherwise."""
    return SimRequest(request_id or model, model, arrival_s, prompt_tokens, output_tokens)


def simulate(
    requests: Sequence[SimRequest],
    box: Mapping[str, SimModel],
    policy: str = "gpupool",
    num_devices: int = 1,
    *,
    device_gb: float = 80,
    end_s: float = 10_000.0,
    num_prefill: int = 1,
    prefetches: bool = True,
    switch_overhead_s: float = 0.0,
    kv_host_bytes: int | None = None,
) -> SimOutcome:
    """A run from the beginning to ``end_s``."""
    device = BoxDevice(
        int(device_gb * GB),
        kv_host_bytes=kv_host_bytes,
        prefetches=prefetches,
        switch_overhead_s=switch_overhead_s,
    )
    simulation = Simulation(
        box, make_policy(policy, PolicyOptions(num_prefill)), [device] * num_devices
    )
    return simulation.run(requests, end_s)
