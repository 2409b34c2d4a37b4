"""The seams that gpupool's source shows: imports, attributes, overridden methods, variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.vllm_seams.release import Release
from scripts.vllm_seams.seam import Seam

ROOT = Path(__file__).resolve().parents[2]
_TREES = ("gpupoold",)
# Attributes of classes that msgspec and pydantic add.
_OF_LIBRARIES = frozenset({"__struct_fields__", "model_fields"})
# Variables that vLLM reads without listing them in ``envs``; the code is in the table of sources.
_UNLISTED = frozenset({"VLLM_DIST_IDENT"})
_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]*[A-Z0-9]")


def seams_in_source(release: Release) -> list[Seam]:
    """Return the seams of all files; ``release`` says which methods override vLLM's.

    Overridden methods are recognised in classes with a base that is imported from vLLM.
    """
    found: list[Seam] = []
    for tree in _TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            user = str(path.relative_to(ROOT))
            found += seams_of(path.read_text("utf-8"), user, release)
    return found


def seams_of(text: str, user: str, release: Release) -> list[Seam]:
    """Return the seams of one file."""
    module = ast.parse(text)
    imports = list(_imports(module))
    names = dict(imports)
    found = {Seam(name, "auto", (user,)) for _, name in imports}
    found |= {Seam(name, "auto", (user,)) for name in _attributes(module, names, release)}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            found |= {Seam(name, "auto", (user,)) for name in _overrides(node, names, release)}
        found |= {Seam(f"envs.{name}", "auto", (user,)) for name in _variables(node)}
    return sorted(found)


def _imports(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the local and the dotted name of each import from vLLM."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and _is_vllm(node.module) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_vllm(alias.name):
                    yield (alias.asname, alias.name) if alias.asname else ("vllm", "vllm")


def _variables(node: ast.AST) -> Iterator[str]:
    """Yield the environment variable of vLLM that a constant or a keyword names."""
    text = getattr(node, {ast.Constant: "value", ast.keyword: "arg"}.get(type(node), ""), None)
    if isinstance(text, str) and _VARIABLE.fullmatch(text) and text not in _UNLISTED:
        yield text


def _is_vllm(name: str | None) -> bool:
    return name is not None and name.split(".")[0] == "vllm"


def _attributes(module: ast.Module, names: dict[str, str], release: Release) -> Iterator[str]:
    """Yield the dotted names of attributes of imported modules and classes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imported = names.get(node.value.id)
            if imported is None or node.attr in _OF_LIBRARIES:
                continue
            place = release.find(imported)
            if place is None or isinstance(place.node, ast.Module | ast.ClassDef):
                yield f"{imported}.{node.attr}"


def _overrides(node: ast.ClassDef, names: dict[str, str], release: Release) -> Iterator[str]:
    bases = [
        names[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in names
    ]
    defined = {
        one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    called = {
        one.func.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and ast.unparse(one.func.value) == "super()"
    }
    for base in bases:
        for method in sorted((defined | called) - {"__init__"}):
            if release.find(f"{base}.{method}") is not None:
                yield f"{base}.{method}"
