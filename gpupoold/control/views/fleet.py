"""What a fleet is told about this daemon."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gpupoold.api.schemas_fleet import FleetModel
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.scheduling.demand import demands_on
from gpupoold.scheduling.state import State
from gpupoold.scheduling.wait_estimate import first_token_in_s

# Prompt of the request whose wait is estimated.
_PROMPT_TOKENS = 256


def fleet_models(
    models: Iterable[ModelInfo], dispatcher: Dispatcher, fleet: Fleet, now_s: float | None = None
) -> list[FleetModel]:
    """Return the models of this node, with the waits and the work of their requests."""
    state, now_s = dispatcher.scheduler.state, time.monotonic() if now_s is None else now_s
    live = dispatcher.live
    found = []
    for one in models:
        requests = live.of_model(one.name)
        known = state.models.get(one.name)
        is_warm = fleet.is_warm(one.name)
        found.append(
            FleetModel(
                name=one.name,
                state=one.state,
                source=one.source,
                weights_bytes=one.weight_bytes,
                load=0.0 if known is None else _load(state, one.name, now_s),
                num_live=len(requests),
                num_waiting=sum(not request.token_times_s for request in requests),
                first_token_in_s=(
                    first_token_in_s(state, known, _PROMPT_TOKENS, now_s)
                    if known is not None and is_warm
                    else None
                ),
                is_resident=any(
                    device.turn is not None and device.turn.model == one.name
                    for device in state.devices.values()
                ),
                aliases=[*one.aliases, *(preset.name for preset in one.presets)],
            )
        )
    return found


def _load(state: State, name: str, now_s: float) -> float:
    """Return the devices that a model's requests need, on the host that needs the fewest."""
    rates = {name: state.arrivals.lasting.rates_rps(now_s).get(name, {})}
    hosts = [state.devices[number] for number in state.models[name].hosts]
    loads = [sum(one.total for one in demands_on(state, rates, device)) for device in hosts]
    return min(loads, default=0.0)
