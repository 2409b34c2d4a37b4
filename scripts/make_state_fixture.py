"""Write a state database of the present schema, with some rows, as SQL.

The repository has such a file for every released schema (``tests/unit/gpupool_state/schemas``),
made by the code of that release, so that tests can migrate each schema. For a schema with a new
table or column add rows that use the new table or column, then run:

    python scripts/make_state_fixture.py tests/unit/gpupool_state/schemas
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import gpupool_state as state
from gpupool_state.migrations import MIGRATIONS
from gpupoold.domain import (
    Adapter,
    DeviceId,
    FinishReason,
    Lateness,
    ModelName,
    ModelSpec,
    ModelState,
    Preset,
    Priority,
    RequestStages,
    Switch,
    Targets,
)

_AT = 1_750_000_000.0


def main() -> None:
    """Write the file of the newest schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder / f"schema-{MIGRATIONS[-1].number}.sql"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / state.DATABASE_NAME
        asyncio.run(_fill(path))
        with closing(sqlite3.connect(path)) as connection:
            text = "\n".join(connection.iterdump()) + "\n"
    target.write_text(text, encoding="utf-8")
    print(target)


async def _fill(path: Path) -> None:
    async with await state.Database.open(path) as db:
        await _add_models(state.Registry(db, now=lambda: _AT))
        await _add_keys(state.ApiKeys(db, now=lambda: _AT))
        history = state.History(db, now=lambda: _AT)
        await history.start()
        _add_history(history)
        await history.stop()


async def _add_models(registry: state.Registry) -> None:
    for number in range(3):
        name = ModelName(f"model-{number}")
        targets = Targets(ttft_s=2.5, tbt_s=0.05)
        aliases = (f"alias-{number}",)
        spec = ModelSpec(name, "s", "/p", targets=targets, aliases=aliases, pace="steady")
        await registry.add(spec)
        await registry.set_state(name, ModelState.READY)
        await registry.set_profiles(name, [_profile(phase) for phase in state.ProfilePhase])
        await registry.set_pinned(name, number == 1)
        await registry.set_engine(name, {"max_num_seqs": "16"})
        await registry.set_devices(name, range(number))
        await registry.set_engine_bytes(name, "A10", number << 20)
        await registry.divisions.replace(name, "0.32.0", {4: "10 heads"})
        await registry.add_further(name, Preset(f"preset-{number}", {"temperature": 0.2}, 20.0))
        await registry.add_further(name, Adapter(f"adapter-{number}", "org/a", "/a", None, 8))


async def _add_keys(keys: state.ApiKeys) -> None:
    powers = state.KeyPowers(("model-0", "model-2"), Priority.LOW, 60, 10_000, 4, 2 * _AT, "50ms")
    await keys.add("AbCd0000", "some", "0" * 64, powers)
    await keys.rotate("some", "1" * 64, _AT + 3600)
    await keys.add("AbCd0001", "all", "2" * 64, state.KeyPowers())
    await keys.note_use([state.KeyUse("AbCd0001", 5, 550, _AT)])
    await keys.add("AbCd0002", "gone", "3" * 64, state.KeyPowers(()))
    await keys.revoke("gone")


def _profile(phase: state.ProfilePhase) -> state.ProfileRow:
    law = (phase, "0.32.0", None, "bfloat16", "linear", (0.01, 0.002), 4096, 11008, 0.99)
    return state.ProfileRow("A10", *law, 0.02, 0.05, 12, _AT)


def _add_history(history: state.History) -> None:
    for number in range(20):
        model, at = ModelName(f"model-{number % 3}"), _AT + number
        where = DeviceId(0)
        name, counts = f"request-{number}", (100, 10, 9)
        reason, error = FinishReason.STOP, ""
        if number == 7:
            reason, error = FinishReason.ERROR, "it failed"
        latencies = (0.5, 0.01, 0.02, 0.03)
        history.record_request(
            state.RequestRow(
                name, model, where, at, *latencies, *counts, reason, 1.5, error, "AbCd0001"
            )
        )
        stages_s = (0.6, 0.1, 0.1, 0.3, 0.1)
        history.record_switch(Switch(at, where, model, None, *stages_s, 1 << 34, 1, 2))
        history.record_event("info", "model_added", model, f"message {number}")
        minute_at = int(_AT) // 60 * 60 + 60 * number
        hour_at = minute_at // 3600 * 3600
        history.record_usage(state.UsageRow(hour_at, model, "AbCd0001", 1, 10, 5, 1.5, 450.0))
        history.record_device_minute(
            state.DeviceMinuteRow(minute_at, 0, 60.0, 1.5, 0.6, 6000.0, 1 << 20, 1 << 21)
        )
        late_s = (0.0, 1.5, 0.25, 0.0)
        ttft, tbt = ("[0.5, [118, 1]]", "[0.09, [64, 9]]")
        history.record_minute(
            state.MinuteRow(
                *(1, 1, 0, 0, 0, 0, 10, 9, 1),
                minute_at=minute_at,
                model=model,
                lateness=Lateness(*late_s),
                first_token=RequestStages(0.0, 0.25, 0.125, 0.025, 0.1),
                between_tokens=RequestStages(computing_s=0.09),
                ttft=ttft,
                tbt=tbt,
            )
        )


if __name__ == "__main__":
    main()
