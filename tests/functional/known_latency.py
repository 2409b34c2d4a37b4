"""A state folder in which every model that is added to an emulated device is profiled already.

Profiling is most of the load of a tiny model: 0.5 to 0.9 s of a core, of which the engine takes
0.1 s. One model of the shared pool in ``conftest.py``, and those of some workers without a daemon,
are profiled.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from gpupool_state import DATABASE_NAME, Database
from gpupoold.engine_versions import check_engine_version
from gpupoold.latency.models import LinearDecode, LinearPrefill, SwitchModel

# Laws that were measured on one core: seconds of a step, and bytes per second.
_LAWS = (
    ("prefill", LinearPrefill.__name__, LinearPrefill(2e-5, 3e-3).constants),
    ("decode", LinearDecode.__name__, LinearDecode(6e-7, 1e-4, 2e-3).constants),
    ("switch", SwitchModel.__name__, (8e9,)),
)
_COLUMNS = (
    "model, revision, measured_at, dtype, engine_version, device, phase, law, constants, "
    "hidden_size, intermediate_size, r_squared, mean_relative_error, p90_relative_error, num_points"
)


def prepare_state(state_dir: Path, profiled: str = "") -> None:
    """Write the state database, unless there is a state folder.

    The model ``profiled`` will be profiled when it is added.
    """
    if not state_dir.exists():
        state_dir.mkdir(parents=True, mode=0o700)
        file = state_dir / DATABASE_NAME
        file.touch(0o600)
        file.write_bytes(_database(profiled))


@cache
def _database(profiled: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as executor:
        path = Path(folder) / DATABASE_NAME
        # A test may have a loop in this thread.
        executor.submit(asyncio.run, _make(path, profiled)).result()
        return path.read_bytes()


async def _make(path: Path, profiled: str) -> None:
    rows = ", ".join(_rows(check_engine_version()))
    async with await Database.open(path) as database, database.write() as transaction:
        await transaction.execute(
            "CREATE TRIGGER latency_is_known AFTER INSERT ON models "
            f"WHEN NEW.name <> '{profiled}' BEGIN "
            f"INSERT INTO profiles ({_COLUMNS}) VALUES {rows}; END"
        )


def _rows(version: str) -> Iterator[str]:
    for num_cores in range(1, (os.cpu_count() or 1) + 1):
        for phase, law, constants in _LAWS:
            values = [version, f"CPU x {num_cores}", phase, law, json.dumps(constants)]
            texts = ", ".join(f"'{value}'" for value in values)
            yield f"(NEW.name, NEW.revision, 0, 'float32', {texts}, 0, 0, 1, 0, 0, 8)"
