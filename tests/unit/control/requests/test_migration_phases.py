"""The phases of a migration, and their transitions."""

from __future__ import annotations

import itertools

import pytest

from gpupoold.control.live_requests import (
    MIGRATION_TRANSITIONS,
    Migration,
    MigrationEvent,
    MigrationPhase,
)


@pytest.mark.parametrize(("phase", "event"), itertools.product(MigrationPhase, MigrationEvent))
def test_only_what_is_in_the_table_is_expected(
    phase: MigrationPhase, event: MigrationEvent
) -> None:
    migration = Migration(0, 1, phase)
    if not migration.expects(event):
        with pytest.raises(KeyError):
            migration.after(event)
        return
    after = migration.after(event)
    assert (after and after.phase) is MIGRATION_TRANSITIONS[phase, event]
    assert after is None or (after.source, after.target) == (0, 1)


def test_every_phase_can_be_reached_and_ends() -> None:
    assert {Migration(0, 1).phase, *MIGRATION_TRANSITIONS.values()} == {*MigrationPhase, None}
    ends = {phase for (phase, _), after in MIGRATION_TRANSITIONS.items() if after is None}
    assert ends == set(MigrationPhase)
    assert {event for _, event in MIGRATION_TRANSITIONS} == set(MigrationEvent)
