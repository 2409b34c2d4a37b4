"""Roles as a user writes them."""

from __future__ import annotations

import pytest

from gpupoold.domain import Role
from gpupoold.errors import UsageError
from gpupoold.sim.scenario import parse_roles, roles_text

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("mixed", (MIXED,)),
        ("prefill,decode", (PREFILL, DECODE)),
        ("2xprefill,3xdecode,mixed", (PREFILL, PREFILL, DECODE, DECODE, DECODE, MIXED)),
    ],
)
def test_what_is_written_is_what_is_read(text: str, roles: tuple[Role, ...]) -> None:
    assert parse_roles(text) == roles
    assert roles_text(roles) == text


def test_auto_leaves_roles_to_the_policy() -> None:
    assert parse_roles(" auto ") == "auto"
    assert roles_text(None) == "auto"


def test_a_role_may_have_space_around_it() -> None:
    assert parse_roles(" 2 x prefill , decode ") == (PREFILL, PREFILL, DECODE)


@pytest.mark.parametrize("text", ["", "prefil", "prefill,", "x2prefill", "-1xmixed", "auto,mixed"])
def test_what_is_no_role_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a role"):
        parse_roles(text)


@pytest.mark.parametrize("text", ["0xprefill", "5000xmixed"])
def test_impossible_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 4096"):
        parse_roles(text)
