"""What a fleet is told about this daemon's models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from gpupool_state import ModelRow
from gpupoold.api.schemas_fleet import FleetModel
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.scheduling.policies.planned_turns import Tuning
from gpupoold.scheduling.policies.rebalancing import expected_work
from gpupoold.scheduling.state import Model, State
from gpupoold.scheduling.velocity import RequestClass
from gpupoold.scheduling.wait_estimate import first_token_in_s

# Prompt of the request whose wait is estimated.
_PROMPT_TOKENS = 256
_LEAD_SHARE = Tuning().lead_share


async def fleet_models(
    rows: Iterable[ModelRow], dispatcher: Dispatcher, fleet: Fleet
) -> list[FleetModel]:
    """Return the models of this node, with the waits and the work of their requests.

    Other work of the event loop comes between two models: the fleet asks twice a second.
    """
    state, now_s = dispatcher.state, time.monotonic()
    rates_rps = state.arrivals.lasting.rates_rps(now_s)
    found = []
    for row in rows:
        name, targets = row.spec.name, row.spec.targets
        one = FleetModel(
            name=name,
            names=list(row.spec.names),
            state=fleet.availability(name).state,
            error=row.error,
            weights_bytes=row.weight_bytes,
            num_live=dispatcher.live.num_of(name),
            first_token_in_s=None,
            ttft_s=targets.ttft_s,
            tbt_s=targets.tbt_s,
            pace=row.spec.pace,
            window_s=_LEAD_SHARE * targets.ttft_s,
        )
        known = state.models.get(name)
        if known is not None:
            _add_work(one, state, known, rates_rps.get(name, {}))
            if fleet.is_warm(name):
                one.first_token_in_s = first_token_in_s(state, known, _PROMPT_TOKENS, now_s)
        found.append(one)
        await asyncio.sleep(0)
    return found


def _add_work(
    one: FleetModel, state: State, model: Model, rates_rps: Mapping[RequestClass, float]
) -> None:
    """Add the expected work on the host that needs the least time for it."""
    kinds = {state.devices[number].up.kind for number in model.hosts}
    works = [expected_work(model, rates_rps, model.speed(kind), _LEAD_SHARE) for kind in kinds]
    if works:
        least = min(works, key=lambda work: work.load)
        one.load, one.busy_share, one.kv_bytes = least.load, least.busy_share, least.kv_bytes
