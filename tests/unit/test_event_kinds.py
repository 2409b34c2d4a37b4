"""The table of event kinds has every kind that the daemon records, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpupoold.event_kinds import EVENT_SUBJECTS, EventSubject
from tests.conftest import ROOT

TREES = ("gpupoold", "state")
RECORDERS = {"record_event": 1, "_event": 1, "_note_change": 1}


def trees() -> Iterator[ast.Module]:
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            if path.name != "event_kinds.py" and "cuda" not in path.parts:
                yield ast.parse(path.read_text())


def recorded_kinds() -> Iterator[str]:
    """Every literal that is given to a recorder as the kind."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                place = RECORDERS.get(node.func.attr)
                if place is not None and len(node.args) > place:
                    kind = node.args[place]
                    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                        yield kind.value


def test_every_recorded_kind_is_in_the_table() -> None:
    kinds = set(recorded_kinds())
    assert len(kinds) > 30
    assert kinds <= set(EVENT_SUBJECTS)


def test_every_kind_of_the_table_is_recorded() -> None:
    literals = {
        node.value for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant)
    }
    assert set(EVENT_SUBJECTS) <= literals


def test_requests_events_have_the_model_as_subject() -> None:
    requests = [kind for kind in EVENT_SUBJECTS if kind.startswith(("request", "refused"))]
    assert len(requests) == 4
    assert {EVENT_SUBJECTS[kind] for kind in requests} == {EventSubject.MODEL}
