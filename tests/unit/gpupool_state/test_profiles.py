"""Profiles: kept with their model, replaced per device, gone with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gpupool_state import Database, ProfilePhase, ProfileRow, Registry
from gpupoold.errors import Failed, NoSuchModel
from tests.unit.gpupool_state.conftest import MakeSpec

PREFILL = ProfileRow(
    device="NVIDIA A10",
    phase=ProfilePhase.PREFILL,
    engine_version="0.32.0",
    revision=None,
    dtype="bfloat16",
    law="PrefillModel",
    constants=(1.0164686574821216e-10, 0.1 + 0.2, 0.0),
    hidden_size=4096,
    intermediate_size=14336,
    r_squared=0.998,
    mean_relative_error=0.02,
    p90_relative_error=0.05,
    num_points=9,
    measured_at=1_700_000_000.5,
)
DECODE = replace(PREFILL, phase=ProfilePhase.DECODE, law="LinearDecode", hidden_size=0)
SWITCH = replace(
    PREFILL,
    phase=ProfilePhase.SWITCH,
    law="SwitchModel",
    constants=(2.5e10,),
    r_squared=0.0,
    mean_relative_error=0.0,
    p90_relative_error=0.0,
    num_points=1,
)
ROWS = (DECODE, PREFILL, SWITCH)


def by_phase(rows: tuple[ProfileRow, ...]) -> tuple[ProfileRow, ...]:
    return tuple(sorted(rows, key=lambda row: row.phase))


async def test_rows_come_back_as_they_were(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("a", "alias"))
    await registry.add(make_spec("b"))
    row = await registry.set_profiles("a", ROWS)
    assert row.profiles == ROWS
    found = await registry.get("alias")
    assert found is not None
    assert found.profiles == ROWS
    assert [model.profiles for model in await registry.list()] == [ROWS, ()]


async def test_other_changes_keep_them(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("a"))
    await registry.set_profiles("a", ROWS)
    row = await registry.update("a", add_aliases=["b"])
    assert row.profiles == ROWS


async def test_a_new_run_replaces_all_of_its_device(
    registry: Registry, make_spec: MakeSpec
) -> None:
    await registry.add(make_spec("a"))
    await registry.set_profiles("a", ROWS)
    other = replace(SWITCH, device="NVIDIA L40S", measured_at=SWITCH.measured_at + 5)
    await registry.set_profiles("a", [other])
    newer = replace(PREFILL, num_points=5, measured_at=PREFILL.measured_at + 10)
    row = await registry.set_profiles("a", [newer])
    # The decode fit of the earlier run is gone, the other device's row is not; newest last.
    assert row.profiles == (other, newer)


async def test_removing_the_model_removes_them(
    registry: Registry, db: Database, make_spec: MakeSpec
) -> None:
    await registry.add(make_spec("a"))
    await registry.set_profiles("a", ROWS)
    await registry.remove("a")
    assert await db.fetch_all("SELECT * FROM profiles") == []
    assert (await registry.add(make_spec("a"))).profiles == ()


async def test_only_models_have_profiles(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("a", "alias"))
    for name in ("nobody", "alias"):
        with pytest.raises(NoSuchModel):
            await registry.set_profiles(name, ROWS)


async def test_a_failed_change_keeps_the_old_ones(
    registry: Registry, make_spec: MakeSpec, fill_disk: Callable[[], Awaitable[None]]
) -> None:
    await registry.add(make_spec("a"))
    await registry.set_profiles("a", [SWITCH])
    await fill_disk()
    long = tuple(float(number) / 7 for number in range(10_000))
    with pytest.raises(Failed, match="space"):
        await registry.set_profiles("a", [replace(PREFILL, constants=long)])
    found = await registry.get("a")
    assert found is not None
    assert found.profiles == (SWITCH,)


async def test_the_table_knows_no_other_phase(db: Database, registry: Registry) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        async with db.write() as tx:
            await tx.execute(
                "INSERT INTO profiles VALUES "
                "('a', 'd', 'lunch', '', NULL, '', '', '[]', 0, 0, NULL, NULL, NULL, 0, 0.0)"
            )
