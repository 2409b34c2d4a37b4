"""Policies by the names that users write."""

from __future__ import annotations

from gpupoold.errors import UsageError
from gpupoold.scheduling.policies import named
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.policies.named import POLICY_NAMES, PolicyOptions

__all__ = ["POLICY_NAMES", "PolicyOptions", "make_policy"]


def make_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return a new policy. Raises UsageError with the known names if ``name`` is unknown."""
    if name not in POLICY_NAMES:
        raise UsageError(f"no policy is named {name!r}", f"known: {', '.join(POLICY_NAMES)}")
    return named.make_policy(name, options)
