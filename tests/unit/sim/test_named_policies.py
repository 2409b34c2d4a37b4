"""Policies by the names that users write."""

from __future__ import annotations

import pytest

from gpupoold.errors import UsageError
from gpupoold.sim.policies import POLICY_NAMES, PolicyOptions, make_policy


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_name_makes_a_new_policy_of_that_name(name: str) -> None:
    one, other = make_policy(name), make_policy(name, PolicyOptions(num_prefill=3))
    assert one is not other
    assert one.name == name


def test_the_published_baselines_are_there() -> None:
    wanted = {"gpupool", "aegaeon", "request-level", "request-level-4", "request-level-sjf"}
    assert wanted | {"static"} <= set(POLICY_NAMES)


def test_an_unknown_name_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="no policy is named 'best'") as caught:
        make_policy("best")
    assert all(name in str(caught.value) for name in POLICY_NAMES)
