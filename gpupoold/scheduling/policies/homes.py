"""The planned homes of models, from the arrivals of the last minutes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpupoold.scheduling.pressure import (
    HomeDevice,
    ModelDemand,
    better_homes,
    has_hurried,
    switching_shares,
)
from gpupoold.scheduling.state import Model, PlannedHome, Speed, State
from gpupoold.scheduling.velocity import RequestClass

_PERIOD_S = 5.0
# Less is no reason to move a model: rates are estimates, and a move costs a copy.
_THRESHOLD = 0.1
# A home that must load the engine is planned from the arrivals of at least so long.
_LEAST_SEEN_S = 30.0
# The share of a device's time for switches to and from a model whose home is elsewhere.
_HELPER_SWITCHING = 0.15


class HomePlanner:
    """Plans homes for models if switches between them may make answers late, or if not all devices
    host all models.

    Otherwise a request is best placed by the loads of the moment. A home may lack the engine, which
    is then loaded (:mod:`gpupoold.scheduling.hosting`).
    """

    def __init__(self, lead_share: float) -> None:
        self._lead_share = lead_share
        self._next_s = -math.inf
        self._homes: dict[str, int] = {}

    def changes(self, state: State, now_s: float) -> dict[str, PlannedHome | None]:
        """Return the homes that have changed, if it is time to plan again.

        Models without arrivals have no home; neither have any if roles are split.
        """
        if now_s < self._next_s:
            return {}
        self._next_s = now_s + _PERIOD_S
        devices = [] if state.is_split else _devices(state, now_s, self._lead_share)
        is_partly_hosted = any(model.hostable for model in state.models.values())
        if is_partly_hosted or any(map(has_hurried, devices)):
            self._homes = better_homes(self._homes, devices, _THRESHOLD)
        else:
            self._homes = {}
        helpers = self._helpers(devices)
        planned = {
            name: PlannedHome(number, frozenset(helpers[name]))
            for name, number in self._homes.items()
        }
        changed = {name: home for name, home in planned.items() if state.models[name].home != home}
        gone = [name for name, model in state.models.items() if model.home and name not in planned]
        return changed | dict.fromkeys(gone)

    def _helpers(self, devices: Sequence[HomeDevice]) -> dict[str, set[int]]:
        """Return the devices where switches to each model would take little time.

        Such switches make no answers of other models late either.
        """
        helpers: dict[str, set[int]] = {name: set() for name in self._homes}
        for device in devices:
            here = [name for name, number in self._homes.items() if number == device.number]
            for name, share in switching_shares(device, here).items():
                if name in helpers and share <= _HELPER_SWITCHING:
                    helpers[name].add(device.number)
        return helpers


def _devices(state: State, now_s: float, lead_share: float) -> list[HomeDevice]:
    """Return the devices in service with the expected work of the models that may live there.

    Those are the hosts of a model, and devices that could load its engine once arrivals are known
    for longer than a load takes. Models without arrivals have no work.
    """
    models, lasting = state.models, state.arrivals.lasting
    rates = {name: one for name, one in lasting.rates_rps(now_s).items() if name in models}
    may_load = lasting.seen_s(now_s) >= _LEAST_SEEN_S
    devices = [device for device in state.devices.values() if not device.is_draining]
    by_kind = {
        kind: {
            name: expected_work(models[name], by_class, models[name].speed(kind), lead_share)
            for name, by_class in rates.items()
        }
        for kind in {device.kind for device in devices}
    }
    return [
        HomeDevice(
            device.number,
            device.capacity_bytes,
            device.bandwidth_bytes_per_s,
            {
                name: demand
                for name, demand in by_kind[device.kind].items()
                if name in device.batches or (may_load and device.number in models[name].hostable)
            },
        )
        for device in devices
    ]


def expected_work(
    model: Model, rates_rps: Mapping[RequestClass, float], speed: Speed, lead_share: float
) -> ModelDemand:
    """Return the expected work of a model on a device of a kind.

    Answers are paced by the TBT target, so the number of live requests is the arrival rate
    times the target's time for an answer (Little's law), and the model is without requests as
    often as an M/G/infinity queue is empty.
    """
    targets = model.targets
    num_live = tokens = prefill_s = 0.0
    for one, rate_rps in rates_rps.items():
        num = rate_rps * one.num_output_tokens * targets.tbt_s
        num_live += num
        tokens += num * (one.num_prompt_tokens + one.num_output_tokens / 2)
        prefill_s += rate_rps * speed.costs.prefill_s(one.num_prompt_tokens)
    busy_share = -math.expm1(-num_live)
    num_if_busy = max(1.0, num_live / busy_share) if busy_share else 1.0
    context_tokens = tokens / num_live * num_if_busy if num_live else 0.0
    step_s = speed.step_s(round(num_if_busy), round(context_tokens))
    decode = busy_share * step_s / targets.tbt_s if model.generates else 0.0
    return ModelDemand(
        model.name,
        decode + prefill_s,
        busy_share,
        lead_share * targets.ttft_s,
        model.weight_bytes,
        tokens * model.kv_bytes_per_token,
    )
