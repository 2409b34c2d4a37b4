"""No test patches a clock: code that depends on the time takes a clock as an argument."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = frozenset({"time", "monotonic", "perf_counter", "process_time", "datetime"})
CLOCKS_TO_THE_NS = frozenset(f"{name}_ns" for name in CLOCKS)
PATCHES = frozenset({"setattr", "setitem", "patch", "object", "dict", "multiple"})


def patched_clocks(source: str) -> Iterator[int]:
    """Yield the lines that replace a clock, or the module of the clocks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node.func) in PATCHES:
            targets = [*node.args[:2], *(one.value for one in node.keywords)]
            if any(_is_clock(one) for one in targets):
                yield node.lineno
        elif isinstance(node, ast.Assign):
            attributes = [one for one in node.targets if isinstance(one, ast.Attribute)]
            if any(one.attr in CLOCKS | CLOCKS_TO_THE_NS for one in attributes):
                yield node.lineno


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_clock(target: ast.expr) -> bool:
    """Return whether a name, a module or a text such as ``a.b.time`` refers to a clock."""
    if isinstance(target, ast.Constant):
        parts = str(target.value).split(".")
    else:
        parts = ast.unparse(target).split(".")
    return parts[0] == "time" or not {parts[-1]}.isdisjoint(CLOCKS | CLOCKS_TO_THE_NS)


def test_no_test_patches_a_clock() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in patched_clocks(path.read_text())
    ]
    assert found == [], "give the code under test a clock"


@pytest.mark.parametrize(
    "source",
    [
        'monkeypatch.setattr(time, "monotonic", lambda: 1.0)',
        'monkeypatch.setattr(residency, "time", clock)',
        'monkeypatch.setattr("gpupoold.logs.files.time", clock)',
        'monkeypatch.setattr("time.sleep", lambda _: None)',
        'setattr(module, "perf_counter", clock)',
        'with mock.patch("gpupoold.logs.files.time.monotonic"): pass',
        '@patch.object(time, "time_ns")\ndef test(): pass',
        "module.time = clock",
    ],
)
def test_a_patched_clock_is_found(source: str) -> None:
    assert len(list(patched_clocks(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "scheduler.clock = lambda: 1.0",
        'monkeypatch.setattr(PeerProtocol, "head_timeout_s", 0.05)',
        "bench.dispatcher.tick(time.monotonic())",
    ],
)
def test_a_clock_that_is_given_is_none(source: str) -> None:
    assert list(patched_clocks(source)) == []
