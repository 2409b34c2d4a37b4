"""No policy attains more than the bound."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from gpupoold.domain import Targets
from gpupoold.sim.bound import attainment_bound
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.metrics import summarise
from gpupoold.sim.policies import POLICY_NAMES, PolicyOptions, make_policy
from gpupoold.sim.scenario import end_of_run_s
from gpupoold.sim.workloads import SimRequest, in_arrival_order
from tests.sim.box import GB, latency

BOXES = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        lambda ttft_s, tbt_s, step_s, sequence_s, weight_gb: (
            Targets(ttft_s, tbt_s),
            latency(step_s, prefill_s=0.005, sequence_s=sequence_s),
            weight_gb,
        ),
        st.sampled_from([0.2, 1.5, 4.0]),
        st.sampled_from([0.004, 0.02, 0.1]),
        st.sampled_from([0.005, 0.02, 0.05]),
        st.sampled_from([0.0, 0.002]),
        st.sampled_from([5, 10]),
    ),
    min_size=1,
)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.floats(0, 6).map(lambda at_s: round(at_s, 2)),
        st.sampled_from([1, 200, 3000]),
        st.sampled_from([1, 2, 30, 200]),
    ),
    min_size=1,
    max_size=25,
)


@given(
    box=BOXES,
    drawn=REQUESTS,
    policy=st.sampled_from(sorted({*POLICY_NAMES} - {"static"})),
    num_devices=st.integers(2, 3),
    is_roomy=st.booleans(),
)
@settings(max_examples=60)
def test_no_policy_attains_more(
    box: dict[str, tuple[Targets, object, int]],
    drawn: list[tuple[int, float, int, int]],
    policy: str,
    num_devices: int,
    is_roomy: bool,
) -> None:
    models = {
        name: SimModel(name, targets, speed, weight_gb * GB, 100_000)  # type: ignore[arg-type]
        for name, (targets, speed, weight_gb) in box.items()
    }
    names = sorted(models)
    requests = in_arrival_order(
        [
            SimRequest(f"r{n}", names[model % len(names)], at_s, prompt, output)
            for n, (model, at_s, prompt, output) in enumerate(drawn)
        ]
    )
    device_bytes = (18 if is_roomy else 12) * GB
    simulation = Simulation(
        models, make_policy(policy, PolicyOptions(1)), [BoxDevice(device_bytes)] * num_devices
    )
    end_s = end_of_run_s(requests, lambda name: models[name].targets, 50.0)
    attained = summarise(simulation.run(requests, end_s).results, end_s).overall.attainment
    bound = attainment_bound(requests, models, num_devices)
    assert attained is not None
    assert bound is not None
    assert attained <= bound + 1e-9
