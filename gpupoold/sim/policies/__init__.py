"""Policies by the names that users of the simulator write: the daemon's, and further baselines."""

from __future__ import annotations

from collections.abc import Callable

from gpupoold.errors import UsageError
from gpupoold.scheduling.policies import named
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.policies.named import PolicyOptions
from gpupoold.sim.policies.baselines import (
    BestFitPolicy,
    PowerOfTwoPolicy,
    ShortestJobPolicy,
    ShortestQueuePolicy,
)

__all__ = ["POLICY_NAMES", "PolicyOptions", "make_policy"]

_BASELINES: dict[str, Callable[[], Policy]] = {
    "request-level-sjf": ShortestJobPolicy,
    "best-fit": BestFitPolicy,
    "shortest-queue": ShortestQueuePolicy,
    "power-of-two": PowerOfTwoPolicy,
}
POLICY_NAMES = (*named.POLICY_NAMES, *_BASELINES)


def make_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return a new policy. Raises UsageError with the known names if ``name`` is unknown."""
    if name in _BASELINES:
        return _BASELINES[name]()
    if name not in POLICY_NAMES:
        raise UsageError(f"no policy is named {name!r}", f"known: {', '.join(POLICY_NAMES)}")
    return named.make_policy(name, options)
