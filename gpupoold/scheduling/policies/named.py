"""The policies of the daemon by name (``scheduling.policy``), with their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpupoold.scheduling.policies.aegaeon import AegaeonPolicy
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.policies.baselines import (
    DecodeFirstPolicy,
    PrefillFirstPolicy,
    RequestLevelPolicy,
    StaticPolicy,
)
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.policies.planned_turns import Tuning


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of policies; a policy ignores options that do not concern it.

    ``num_prefill``: devices with the prefill role, by default one. ``quota_max_s``: the longest
    turn, by default the policy's own. ``converts_decoders``: decode devices prefill in chunks when
    no prefill device has a first token in time.
    """

    num_prefill: int | None = None
    quota_max_s: float | None = None
    converts_decoders: bool = True


def _aegaeon(options: PolicyOptions) -> Policy:
    num_prefill = 1 if options.num_prefill is None else options.num_prefill
    if options.quota_max_s is None:
        return AegaeonPolicy(num_prefill)
    return AegaeonPolicy(num_prefill, options.quota_max_s)


def _gpupool(options: PolicyOptions) -> Policy:
    quota_max_s = options.quota_max_s
    tuning = None if quota_max_s is None else Tuning(turn_max_s=quota_max_s)
    return GpupoolPolicy(tuning, converts_decoders=options.converts_decoders)


_POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "gpupool": _gpupool,
    "aegaeon": _aegaeon,
    "request-level": lambda _: RequestLevelPolicy(),
    "request-level-4": lambda _: RequestLevelPolicy("request-level-4", max_live=4),
    "static": lambda _: StaticPolicy(),
    "prefill-first": lambda _: PrefillFirstPolicy(),
    "decode-first": lambda _: DecodeFirstPolicy(),
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return a new policy.

    Raises:
        KeyError: the name is unknown; see ``POLICY_NAMES``.
    """
    return _POLICIES[name](options or PolicyOptions())
