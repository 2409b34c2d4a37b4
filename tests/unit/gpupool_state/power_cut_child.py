"""Changes a state database step by step: a program of its own, whose calls of fsync are watched.

After each step it prints the step's name, and waits for a line.

    python -m tests.unit.gpupool_state.power_cut_child DATABASE
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gpupool_state import ApiKeys, Database, History, KeyUse, Registry
from gpupoold.api_keys import KeyPowers
from gpupoold.domain import ModelName, ModelSpec, Targets

SPEC = ModelSpec(
    name=ModelName("llama"),
    source="meta/llama",
    path="/models/llama",
    revision=None,
    dtype="bfloat16",
    max_model_len=4096,
    targets=Targets(ttft_s=2.0, tbt_s=0.05),
)


async def main(path: Path) -> None:
    """Make the changes."""
    async with await Database.open(path) as db:
        keys, history = ApiKeys(db), History(db, flush_interval_s=0.01)
        await history.start()
        step("opened")
        await keys.add("k1", "ada", "digest", KeyPowers())
        step("key added")
        await Registry(db).add(SPEC)
        step("model added")
        for number in range(20):
            history.record_event("info", "model_added", "subject", f"event {number}")
            while await num_events(db) <= number:
                await asyncio.sleep(0.01)
            await keys.note_use([KeyUse("k1", 1, 1, 1.0)])
        step("history written")
        await keys.revoke("ada")
        step("key revoked")


async def num_events(db: Database) -> int:
    """Events in the database."""
    [row] = await db.fetch_all("SELECT count(*) AS num FROM events")
    return int(row["num"])


def step(name: str) -> None:
    """Say what is done and wait."""
    print(name, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
