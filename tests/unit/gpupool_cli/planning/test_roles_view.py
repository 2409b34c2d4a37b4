"""Fixed roles in the output of ``gpupool plan``."""

from __future__ import annotations

from gpupool_cli.planning.view import roles_document, roles_lines
from gpupoold.sim.planner.run import Attained, FixedRoles, RolesTried

CHOSEN = Attained(0.5, (0.4, 0.5, 0.6))
QUICK = RolesTried(1, "prefill,decode", Attained(0.6, (0.6,)))


def roles(*by_run: float) -> FixedRoles:
    best = RolesTried(1, "prefill,decode", Attained(0.625, by_run))
    return FixedRoles(CHOSEN, (QUICK,), best)


def lines(found: FixedRoles | None) -> list[str]:
    return roles_lines(found, lambda one: f"{one.overall}", lambda share: f"{share}")


def test_better_roles_are_named_with_gain_and_confidence() -> None:
    better, sure = lines(roles(0.6, 0.6, 0.7))
    assert better.startswith("Fixed roles are better: prefill,decode gives 0.625 of the tokens")
    assert "12 points more than" in better
    assert sure.startswith("One-sided confidence that they are better in most such periods: 0.75")


def test_other_roles_are_only_in_the_document() -> None:
    assert lines(None) == lines(FixedRoles(CHOSEN, (QUICK,))) == lines(roles(0.6, 0.6, 0.5)) == []
    document = roles_document(roles(0.6, 0.6, 0.5))
    assert document["fixed_roles"] == {
        "roles": "prefill,decode",
        "num_prefill": 1,
        "attainment": 0.625,
        "attainment_by_run": [0.6, 0.6, 0.5],
        "gain": 0.125,
        "is_better": False,
        "confidence": None,
    }
    quick = {"roles": "prefill,decode", "num_prefill": 1, "attainment": 0.6}
    assert document["fixed_roles_tried"] == [quick | {"attainment_by_run": [0.6]}]
    assert roles_document(None) == {"fixed_roles": None, "fixed_roles_tried": []}
