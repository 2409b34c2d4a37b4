"""The seams with vLLM: the table covers gpupool's source and matches the installed release."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gpupoold.engine_versions import CHECKED_VERSIONS, check_engine_version
from scripts.vllm_seams import records, wheels
from scripts.vllm_seams.compare import compare
from scripts.vllm_seams.found import ROOT, seams_of
from scripts.vllm_seams.release import ABSENT, Release
from scripts.vllm_seams.seam import Seam, merged
from scripts.vllm_seams.table import seams_in_table

UPDATE = "run `python scripts/check_vllm.py installed --record`"


@pytest.fixture(scope="module")
def installed() -> Release:
    return Release(wheels.installed_sources())


@pytest.fixture(scope="module")
def seams(installed: Release) -> list[Seam]:
    return records.all_seams(installed)


def test_installed_release_is_as_recorded(installed: Release, seams: list[Seam]) -> None:
    version = check_engine_version().partition("+")[0]
    record = records.load(version)
    rows = compare(seams, record, installed, None)
    assert rows
    differing = {row.seam.name: (row.status, row.change) for row in rows if row.is_open}
    assert differing == {}, UPDATE
    assert record.keys() == {records.key(seam) for seam in seams}, UPDATE


def test_every_import_is_a_seam(seams: list[Seam]) -> None:
    names = {seam.name for seam in seams}
    imported = set()
    for path in (ROOT / "gpupoold").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.Import):
                imported |= {one.name for one in node.names if one.name.startswith("vllm.")}
    assert len(imported) > 50
    assert imported <= names


def test_every_seam_is_in_a_checked_release(seams: list[Seam]) -> None:
    assert set(records.recorded_versions()) == set(CHECKED_VERSIONS)
    all_records = [records.load(version) for version in CHECKED_VERSIONS]
    for seam in seams:
        found = [record.get(records.key(seam), ABSENT) for record in all_records]
        assert any(one != ABSENT for one in found), f"no release has {seam.name}"


def test_users_exist() -> None:
    for seam in seams_in_table():
        assert all((ROOT / user).is_file() for user in seam.users), seam


VLLM = {
    "vllm/__init__.py": """
from .version import __version__
MODULE_ATTRS = {"Params": ".params:Params"}
""",
    "vllm/version.py": "try:\n    from ._version import __version__\nexcept ImportError: pass",
    "vllm/_version.py": "__version__ = '1.0'",
    "vllm/envs.py": """
environment_variables: dict = {
    "VLLM_LEVEL": lambda: int(os.environ.get("VLLM_LEVEL", "1")),
}
""",
    "vllm/params.py": """
import dataclasses
@dataclasses.dataclass
class Params:
    n: int = 1
    stop: str | None = None
""",
    "vllm/base.py": '''
class Base:
    def __init__(self, config, *, device="cpu"):
        """Docstring."""
        self.queue, self.size = [], 0
    def step(self, tokens: int, last: bool = False) -> None:
        # A comment.
        self.queue.append(tokens)
''',
    "vllm/engine.py": """
from vllm.base import Base as Root
class Engine(Root):
    @property
    def name(self):
        return "engine"
_cache = {}
""",
}


def tree(folder: Path, **changes: str) -> Release:
    for name, text in VLLM.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changes.get(path.stem, text))
    return Release(folder)


USER = """
import vllm
from vllm import Params
from vllm import engine
from vllm.engine import Engine as VllmEngine

class Mine(VllmEngine):
    def __init__(self): ...
    def step(self, tokens, last=False):
        engine._cache.clear()
        return super().step(tokens)
    def other(self): ...

os.environ.update(VLLM_LEVEL="1")
"""


def test_names_in_source(tmp_path: Path) -> None:
    found = seams_of(USER, "mine.py", tree(tmp_path))
    assert {seam.name for seam in found} == {
        "vllm",
        "vllm.Params",
        "vllm.engine",
        "vllm.engine._cache",
        "vllm.engine.Engine",
        "vllm.engine.Engine.step",
        "envs.VLLM_LEVEL",
    }


@pytest.mark.parametrize(
    ("name", "compared", "kind", "text"),
    [
        ("vllm.__version__", "auto", "variable", "present"),
        ("vllm.Params", "auto", "class", "n: int = 1; stop: str | None = None"),
        ("vllm.engine", "auto", "module", "present"),
        ("vllm.engine._cache", "auto", "variable", "present"),
        ("vllm.engine.Engine", "auto", "class", "(self, config, *, device='cpu')"),
        ("vllm.engine.Engine.step", "auto", "method", "(self, tokens, last=False)"),
        ("vllm.engine.Engine.name", "auto", "method", "@property (self)"),
        ("vllm.engine.Engine.queue", "auto", "field", "present"),
        ("vllm.engine.Engine.size", "auto", "field", "present"),
    ],
)
def test_descriptions(tmp_path: Path, name: str, compared: str, kind: str, text: str) -> None:
    found = tree(tmp_path).describe(name, compared)  # type: ignore[arg-type]
    assert (found.kind, found.text) == (kind, text)


@pytest.mark.parametrize(
    "name", ["vllm.gone", "vllm.engine.Engine.gone", "vllm.gone.Engine", "envs.VLLM_GONE"]
)
def test_absent(tmp_path: Path, name: str) -> None:
    assert tree(tmp_path).describe(name, "auto") == ABSENT


def changes_of(tmp_path: Path, seams: list[Seam], **changes: str) -> dict[str, tuple[str, str]]:
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new", **changes)
    rows = compare(seams, records.describe(seams, old), new, None)
    return {row.seam.name: (row.status, row.change) for row in rows if row.is_open}


def test_comments_and_docstrings_do_not_count(tmp_path: Path) -> None:
    text = VLLM["vllm/base.py"].replace("Docstring", "Other").replace("# A comment.", "# Another.")
    seams = [Seam("vllm.engine.Engine.step", "source", ("mine.py",))]
    assert changes_of(tmp_path, seams, base=text) == {}


def test_changes_are_named(tmp_path: Path) -> None:
    seams = [
        Seam("vllm.engine.Engine.step", "auto", ("mine.py",)),
        Seam("vllm.base.Base.__init__", "source", ("mine.py",)),
        Seam("vllm.Params", "auto", ("mine.py",)),
        Seam("envs.VLLM_LEVEL", "auto", ("mine.py",)),
        Seam("vllm.engine.Engine.queue", "auto", ("mine.py",)),
    ]
    base = VLLM["vllm/base.py"].replace("last: bool", "is_last: bool").replace("queue", "line")
    params = VLLM["vllm/params.py"].replace("n: int = 1", "n: int = 2")
    envs = VLLM["vllm/envs.py"].replace('"1"', '"2"')
    assert changes_of(tmp_path, seams, base=base, params=params, envs=envs) == {
        "vllm.engine.Engine.step": (
            "changed",
            "(self, tokens, last=False), now (self, tokens, is_last=False)",
        ),
        "vllm.base.Base.__init__": ("changed", "other code"),
        "vllm.Params": ("changed", "-n: int = 1, +n: int = 2"),
        "envs.VLLM_LEVEL": ("changed", "other code"),
        "vllm.engine.Engine.queue": ("missing", ""),
    }


def test_reviewed_changes_are_not_open(tmp_path: Path) -> None:
    seams = [Seam("vllm.Params", "auto", ("mine.py",))]
    old = tree(tmp_path / "old")
    new = tree(tmp_path / "new", params="class Params:\n    def __init__(self): ...")
    reviewed = records.describe(seams, new)
    [row] = compare(seams, records.describe(seams, old), new, reviewed)
    assert (row.status, row.is_reviewed, row.is_open) == ("changed", True, False)
    [row] = compare(seams, {}, new, None)
    assert (row.status, row.is_open) == ("unknown", True)


def test_source_takes_the_place_of_other_comparisons() -> None:
    seams = [Seam("vllm.a", "auto", ("x.py",)), Seam("vllm.a", "source", ("y.py",))]
    assert merged(seams) == [Seam("vllm.a", "source", ("x.py", "y.py"))]
