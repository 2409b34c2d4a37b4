"""Presets and adapters: further names of models with details, in the table of aliases."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from gpupool_state.writer import Transaction
from gpupoold.domain import Adapter, Preset

SELECT_FURTHER = """
    SELECT json_group_array(json_array(kind, alias, details))
    FROM (SELECT * FROM aliases WHERE model = models.name AND kind != 'alias' ORDER BY id)
"""


async def insert_further(tx: Transaction, model: str, further: Preset | Adapter) -> None:
    """Insert a preset or adapter of ``model``, whose name is free."""
    details = asdict(further)
    name = details.pop("name")
    kind = "preset" if isinstance(further, Preset) else "adapter"
    await tx.execute(
        "INSERT INTO aliases (alias, model, kind, details) VALUES (?, ?, ?, ?)",
        (name, model, kind, json.dumps(details)),
    )


def read_further(text: str) -> tuple[tuple[Preset, ...], tuple[Adapter, ...]]:
    """Return the presets and adapters in a result of ``SELECT_FURTHER``."""
    presets: list[Preset] = []
    adapters: list[Adapter] = []
    for kind, name, details in json.loads(text):
        fields: dict[str, Any] = json.loads(details)
        if kind == "preset":
            presets.append(Preset(name=name, **fields))
        else:
            adapters.append(Adapter(name=name, **fields))
    return tuple(presets), tuple(adapters)
