"""One name for one thing: no two classes of the product share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("gpupoold", "cli/gpupool_cli", "tui/gpupool_tui", "state/gpupool_state")


def test_no_two_classes_share_a_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for tree in TREES:
        for file in sorted((ROOT / tree).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert places
    assert {name: at for name, at in places.items() if len(at) > 1} == {}
