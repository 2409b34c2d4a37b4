"""Every schema that was ever released is taken forward with all its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool_state import ApiKeys, Database, History, Registry
from gpupool_state.migrations import MIGRATIONS
from gpupoold.errors import Refused
from tests.unit.gpupool_state.old_schemas import (
    FOLDER,
    NEWEST,
    has_kept,
    is_sound,
    make,
    number_of,
    rows_of,
)

pytestmark = pytest.mark.asyncio


async def test_there_is_a_database_of_every_schema() -> None:
    expected = {f"schema-{step.number}.sql" for step in MIGRATIONS}
    assert {file.name for file in FOLDER.iterdir()} == expected


@pytest.mark.parametrize("number", range(1, NEWEST + 1))
async def test_all_rows_are_kept(path: Path, number: int) -> None:
    make(path, number)
    before = rows_of(path)
    num_further = 2 if number >= 8 else 0  # a preset and an adapter for each model
    assert len(before["models"]) == 3
    assert len(before["aliases"]) == 3 * (1 + num_further)
    assert number < 2 or len(before["requests"]) == 20
    await (await Database.open(path)).close()
    assert number_of(path) == NEWEST
    assert has_kept(before, rows_of(path))
    assert is_sound(path)


@pytest.mark.parametrize("number", range(1, NEWEST))
async def test_a_copy_is_made_before(path: Path, number: int) -> None:
    make(path, number)
    before = rows_of(path)
    await (await Database.open(path)).close()
    backup = path.with_name(f"{path.name}.bak-{number}")
    assert (number_of(backup), rows_of(backup)) == (number, before)
    assert is_sound(backup)
    assert sorted(path.parent.iterdir()) == sorted([path, backup])


@pytest.mark.parametrize("number", range(1, NEWEST + 1))
async def test_what_was_kept_can_be_read_and_written(path: Path, number: int) -> None:
    make(path, number)
    async with await Database.open(path) as db:
        registry, history = Registry(db), History(db, flush_interval_s=60)
        assert [row.spec.aliases for row in await registry.list()] == [
            (f"alias-{index}",) for index in range(3)
        ]
        further = [len(row.spec.presets + row.spec.adapters) for row in await registry.list()]
        assert further == [2 if number >= 8 else 0] * 3
        assert (await registry.set_pinned("model-0", True)).is_pinned
        await history.start()
        num_events = len(await history.events_after(0, 1000))
        history.record_event("info", "model_added", "subject", "one more")
        await history.stop()
        assert len(await history.events_after(0, 1000)) == num_events + 1
        requests = await history.recent_requests()
        assert len(requests) == (20 if number >= 2 else 0)
        errors = [row.error for row in requests if row.error]
        assert errors == (["it failed"] if number >= 5 else [])
        assert len(await history.recent_requests()) == (20 if number >= 2 else 0)
        assert len(await ApiKeys(db).list(with_revoked=True)) == (3 if number >= 6 else 0)
        minutes = [row async for part in history.minutes(0.0) for row in part]
        assert len(minutes) == (20 if number >= 5 else 0)
        has_stages = number >= 11
        assert {row.first_tokens for row in minutes} <= {1 if has_stages else 0}
        assert all(bool(row.first_token.total_s) is has_stages for row in minutes)


@pytest.mark.parametrize("number", range(1, NEWEST))
async def test_older_programs_refuse_it_and_can_go_on_with_the_copy(
    path: Path, number: int
) -> None:
    make(path, number)
    before = rows_of(path)
    await (await Database.open(path)).close()
    older = [step for step in MIGRATIONS if step.number <= number]
    with pytest.raises(Refused, match=rf"schema version {NEWEST}.*up to {number}") as caught:
        await Database.open(path, migrations=older)
    backup = path.with_name(f"{path.name}.bak-{number}")
    assert backup.name in caught.value.hint
    await (await Database.open(backup, migrations=older)).close()
    assert rows_of(backup) == before
