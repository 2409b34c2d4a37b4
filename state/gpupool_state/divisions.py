"""Verdicts of vLLM on the division of models among the GPUs of a group."""

from __future__ import annotations

from collections.abc import Mapping

from gpupool_state.db import Database

_INSERT = """
INSERT INTO divisions (model, engine_version, degree, reason)
SELECT name, ?2, ?3, ?4 FROM models WHERE name = ?1
"""


class KnownDivisions:
    """The numbers of GPUs that cannot divide a model, with vLLM's reason, by version of vLLM.

    The verdicts on a model end with the model, and with a change of its options.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    async def of_version(self, engine_version: str) -> dict[str, dict[int, str]]:
        """Return the reasons of a version of vLLM, by model and number of GPUs."""
        rows = await self._db.fetch_all(
            "SELECT model, degree, reason FROM divisions WHERE engine_version = ?",
            (engine_version,),
        )
        found: dict[str, dict[int, str]] = {}
        for row in rows:
            found.setdefault(row["model"], {})[row["degree"]] = row["reason"]
        return found

    async def replace(self, model: str, engine_version: str, reasons: Mapping[int, str]) -> None:
        """Replace the verdicts on a model; no effect on a model that is not registered."""
        async with self._db.write() as tx:
            await tx.execute("DELETE FROM divisions WHERE model = ?", (model,))
            values = [(model, engine_version, degree, why) for degree, why in reasons.items()]
            await tx.execute_many(_INSERT, values)
