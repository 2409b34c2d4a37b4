"""What a fleet is told about this daemon's models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from gpupoold.api.schemas_fleet import FleetModel
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.scheduling.policies.homes import expected_work
from gpupoold.scheduling.policies.planned_turns import Tuning
from gpupoold.scheduling.state import Model, State
from gpupoold.scheduling.velocity import RequestClass
from gpupoold.scheduling.wait_estimate import first_token_in_s

# Prompt of the request whose wait is estimated.
_PROMPT_TOKENS = 256
_LEAD_SHARE = Tuning().lead_share


def fleet_models(
    models: Iterable[ModelInfo], dispatcher: Dispatcher, fleet: Fleet
) -> list[FleetModel]:
    """Return the models of this node, with the waits and the work of their requests."""
    state, now_s = dispatcher.scheduler.state, time.monotonic()
    rates_rps = state.arrivals.lasting.rates_rps(now_s)
    on_turn = {one.turn.model for one in state.devices.values() if one.turn is not None}
    found = []
    for info in models:
        live = dispatcher.live.of_model(info.name)
        one = FleetModel(
            name=info.name,
            names=[info.name, *info.aliases, *(each.name for each in info.presets)]
            + [each.name for each in info.adapters],
            state=info.state,
            error=info.error,
            weights_bytes=info.weight_bytes,
            num_live=len(live),
            num_waiting=sum(not request.token_times_s for request in live),
            first_token_in_s=None,
            is_on_turn=info.name in on_turn,
            ttft_s=info.ttft_s,
            window_s=_LEAD_SHARE * info.ttft_s,
        )
        known = state.models.get(info.name)
        if known is not None:
            _add_work(one, state, known, rates_rps.get(info.name, {}))
            if fleet.is_warm(info.name):
                one.first_token_in_s = first_token_in_s(state, known, _PROMPT_TOKENS, now_s)
        found.append(one)
    return found


def _add_work(
    one: FleetModel, state: State, model: Model, rates_rps: Mapping[RequestClass, float]
) -> None:
    """Add the expected work on the host that needs the least time for it."""
    kinds = {state.devices[number].kind for number in model.hosts}
    works = [expected_work(model, rates_rps, model.speed(kind), _LEAD_SHARE) for kind in kinds]
    if works:
        least = min(works, key=lambda work: work.load)
        one.load, one.busy_share, one.kv_bytes = least.load, least.busy_share, least.kv_bytes
