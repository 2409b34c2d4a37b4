"""Roles: by hand and by the policy."""

from __future__ import annotations

import pytest

from gpupoold.control.workers.worker import Roles
from gpupoold.domain import Role


def test_one_of_which_nobody_has_said_anything_does_both() -> None:
    assert Roles().of(3) == (Role.MIXED, False)
    assert Roles([None]).of(0) == (Role.MIXED, False)


def test_those_of_the_configuration_are_fixed() -> None:
    roles = Roles([Role.PREFILL, None, Role.MIXED])
    assert roles.of(0) == (Role.PREFILL, True)
    assert roles.of(1) == (Role.MIXED, False)
    assert roles.of(2) == (Role.MIXED, True)  # the policy is not to change it


def test_what_the_policy_chooses_gives_way_to_a_hand() -> None:
    roles = Roles()
    roles.chosen(0, Role.DECODE)
    assert roles.of(0) == (Role.DECODE, False)
    roles.fix(0, Role.PREFILL)
    assert roles.of(0) == (Role.PREFILL, True)
    roles.chosen(0, Role.MIXED)
    assert roles.of(0) == (Role.PREFILL, True)


@pytest.mark.parametrize("before", [None, Role.DECODE])
def test_given_back_to_the_policy_it_stays_until_that_has_an_opinion(before: Role | None) -> None:
    roles = Roles()
    if before is not None:
        roles.chosen(0, before)
    roles.fix(0, Role.PREFILL)
    roles.fix(0, None)
    assert roles.of(0) == (Role.PREFILL, False)
    roles.chosen(0, Role.DECODE)
    assert roles.of(0) == (Role.DECODE, False)
