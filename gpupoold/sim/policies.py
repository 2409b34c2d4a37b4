"""Policies by name, for the simulator's command line."""

from __future__ import annotations

from operator import attrgetter

from gpupoold.errors import UsageError
from gpupoold.scheduling.placement import StickyPlacement, WholeDevicePlacement
from gpupoold.scheduling.request_level import RequestLevelScheduler
from gpupoold.scheduling.turns import TurnScheduler
from gpupoold.sim.engine import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("gpupool", StickyPlacement, TurnScheduler),
        Policy("request-level", WholeDevicePlacement, RequestLevelScheduler, prefetches=False),
        Policy(
            "request-level-sjf",
            WholeDevicePlacement,
            RequestLevelScheduler,
            prefetches=False,
            rank=attrgetter("output_tokens"),
        ),
    )
}


def policy_named(name: str) -> Policy:
    """The policy of this name. Raises UsageError with the known names."""
    if name not in POLICIES:
        raise UsageError(f"no policy is named {name!r}", f"known: {', '.join(POLICIES)}")
    return POLICIES[name]
