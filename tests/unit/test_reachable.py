"""Each module of the product, and each definition at its top, is reached from an entry point.

The graph is static: imports at any depth, and modules that strings name (a module started with
``python -m``, vLLM's ``worker_cls``). A definition is reached from a reached module's own
statements, or from the body of a reached definition.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gpupoold", "cli/gpupool_cli", "tui/gpupool_tui", "state/gpupool_state")
# Users of product code besides the product.
TOOLS = ("benchmarks", "scripts", "examples")

# Functions of modules that are imported by name.
CALLED_BY_NAME = {"main", "preload", "VllmModelApi", "try_grammar"}


@dataclass
class Definition:
    """A function or class at the top of a module, or the module's other statements."""

    nodes: list[ast.stmt] = field(default_factory=list)

    def walk(self) -> Iterator[ast.AST]:
        for node in self.nodes:
            yield from ast.walk(node)


def is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Return whether a decorator like ``@app.command(...)`` registers a definition."""
    decorators = (one.func for one in node.decorator_list if isinstance(one, ast.Call))
    return any(
        isinstance(one, ast.Attribute) and one.attr in ("command", "register") for one in decorators
    )


@dataclass
class Module:
    name: str
    tree: ast.Module

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Definitions by name; under "" what runs on import."""
        found: dict[str, Definition] = {"": Definition()}
        for node in self.tree.body:
            name = ""
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = "" if is_registered(node) else node.name
            found.setdefault(name, Definition()).nodes.append(node)
        return found

    @cached_property
    def imports(self) -> dict[str, str]:
        """Full names by local name, for imports at any depth."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name] = alias.name
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.name}: a relative import"
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    @cached_property
    def strings(self) -> set[str]:
        """Constant strings, also with the constant beginning of each f-string in front."""
        plain: set[str] = set()
        starts: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                plain.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                match node.values[0]:
                    case ast.Constant(str(start)):
                        starts.add(start)
        return plain | {f"{start}{text}" for start in starts for text in plain}


@cache
def read(folders: tuple[str, ...]) -> dict[str, Module]:
    """Modules by full name; read by tests, not when they are collected."""
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to((ROOT / folder).parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = Module(name, ast.parse(path.read_text("utf-8")))
    return found


def product() -> dict[str, Module]:
    return read(PACKAGES)


def entry_points() -> set[str]:
    """Functions that ``pyproject.toml`` names, as full names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return {target.replace(":", ".") for group in groups for target in group.values()}


def split(name: str) -> tuple[str, str]:
    """Return the longest module of the product that begins a full name, and the rest."""
    module, rest = name, ""
    while module and module not in product():
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}".rstrip(".")
    return module, rest


def named_modules(module: Module) -> Iterator[str]:
    """Modules that the strings of a module name; a package stands for its ``__main__``."""
    for text in module.strings:
        if text.startswith(("gpupoold.", "gpupool_")) and text != module.name:
            name, _ = split(text)
            yield from (name, f"{name}.__main__")


def reached_modules(starts: set[str]) -> set[str]:
    reached: set[str] = set()
    waiting = {split(start)[0] for start in starts}
    while waiting:
        name = waiting.pop()
        if name in reached or name not in product():
            continue
        reached.add(name)
        module = product()[name]
        waiting |= {split(target)[0] for target in module.imports.values()}
        waiting |= {*named_modules(module), name.rpartition(".")[0]}
    return reached


def uses(module: Module, definition: Definition) -> Iterator[str]:
    """Full names that a definition uses, as far as they are known without running."""
    for node in definition.walk():
        if isinstance(node, ast.Name):
            yield module.imports.get(node.id, f"{module.name}.{node.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{module.imports.get(node.value.id, '?')}.{node.attr}"


def unused_names(modules: set[str], users: dict[str, Module]) -> set[str]:
    """Definitions of ``modules`` that neither these modules reach nor ``users``."""
    definitions = {
        f"{module}.{name}" for module in modules for name in product()[module].definitions
    }
    waiting = {f"{module}.{name}" for module in modules for name in ("", *CALLED_BY_NAME)}
    waiting |= entry_points() | {text for module in modules for text in product()[module].strings}
    waiting |= {use for user in users.values() for use in user.imports.values()}
    used: set[str] = set()
    while waiting:
        name, attributes = split(waiting.pop())
        definition = attributes.partition(".")[0]
        full = f"{name}.{definition}"
        if name not in product() or full in used:
            continue
        used.add(full)
        module = product()[name]
        if full in definitions:
            waiting |= set(uses(module, module.definitions[definition]))
        elif definition in module.imports:  # a package that offers a name of its module
            waiting.add(module.imports[definition])
    return definitions - used


def test_each_module_is_reached() -> None:
    assert set(product()) - reached_modules(entry_points()) == set()


def test_each_definition_is_reached() -> None:
    modules = reached_modules(entry_points())
    assert unused_names(modules, read(TOOLS)) == set()
