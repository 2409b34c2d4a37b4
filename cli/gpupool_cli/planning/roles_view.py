"""Fixed roles of devices in the output of ``gpupool plan``."""

from __future__ import annotations

from collections.abc import Callable

from gpupoold.sim.planner.roles import FixedRoles, RolesTried
from gpupoold.sim.planner.run import Attained


def roles_lines(
    roles: FixedRoles | None,
    attained: Callable[[Attained], str],
    percent: Callable[[float | None], str],
) -> list[str]:
    """Return fixed roles that are better than the policy's own, empty without such roles.

    ``attained`` and ``percent`` return shares as text.
    """
    if roles is None or roles.best is None or roles.gain is None or not roles.is_better:
        return []
    lines = [
        f"Fixed roles are better: {roles.best.text} gives {attained(roles.best.attained)} of the "
        f"tokens in time, {100 * roles.gain:.2g} points more than the roles that the policy "
        "chooses."
    ]
    if roles.confidence is not None:
        lines.append(
            "One-sided confidence that they are better in most such periods: "
            f"{percent(roles.confidence)}; --runs draws more."
        )
    return lines


def roles_document(roles: FixedRoles | None) -> dict[str, object]:
    """Return the best fixed roles and all tried roles as JSON keys."""
    best = None
    if roles is not None and roles.best is not None:
        best = _tried_document(roles.best) | {
            "gain": roles.gain,
            "is_better": roles.is_better,
            "confidence": roles.confidence,
        }
    tried = () if roles is None else roles.tried
    return {"fixed_roles": best, "fixed_roles_tried": [_tried_document(one) for one in tried]}


def _tried_document(tried: RolesTried) -> dict[str, object]:
    return {
        "roles": tried.text,
        "num_prefill": tried.num_prefill,
        "attainment": tried.attained.overall,
        "attainment_by_run": list(tried.attained.by_run),
    }
