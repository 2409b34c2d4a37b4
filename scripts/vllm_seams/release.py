"""The Python sources of one vLLM release, read without an import."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.vllm_seams.seam import Compared

_ENVIRONMENT = "envs."
_MAX_HOPS = 20
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Place:
    """The definition of a name: a module's file, or a node in a file."""

    module: str
    node: ast.AST
    owner: ast.ClassDef | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What a release has under a name."""

    kind: str
    """``module``, ``class``, ``function``, ``field``, ``variable`` or ``absent``."""
    text: str
    """Text that is equal in two releases if the name is used in the same way."""


ABSENT = Description("absent", "")


class Release:
    """The package ``vllm`` in the folder ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}

    def describe(self, name: str, compared: Compared) -> Description:
        """Return the kind and the compared text of a name; ``ABSENT`` if the release lacks it."""
        place = self.find(name)
        if place is None:
            return ABSENT
        return Description(_kind(place), self._text(place, compared))

    def source(self, name: str) -> str:
        """Return the source of a name without comments and docstrings; "" if absent."""
        place = self.find(name)
        return "" if place is None else ast.unparse(_without_docstrings(place.node))

    def find(self, name: str) -> Place | None:
        """Return where a dotted name is defined, through re-exports and base classes."""
        if name.startswith(_ENVIRONMENT):
            return self._environment_variable(name.removeprefix(_ENVIRONMENT))
        return self._find(name, _MAX_HOPS)

    def _find(self, name: str, hops: int) -> Place | None:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            tree = self._tree(module)
            if tree is not None:
                return self._member(Place(module, tree), parts[length:], hops)
        return None

    def _member(self, place: Place, rest: list[str], hops: int) -> Place | None:
        if not rest:
            return place
        if not hops:
            return None
        if isinstance(place.node, ast.ClassDef):
            found = self._attribute(place, rest[0], hops - 1)
        elif isinstance(place.node, ast.Module):
            found = self._top_level(place.module, place.node, rest[0], hops - 1)
        else:
            return None  # an attribute of a variable: its type is not known
        return None if found is None else self._member(found, rest[1:], hops - 1)

    def _top_level(self, module: str, tree: ast.Module, name: str, hops: int) -> Place | None:
        exported: str | None = None
        for node in _statements(tree.body):
            is_definition = isinstance(node, _Function | ast.ClassDef) and node.name == name
            if is_definition or name in _assigned(node):
                return Place(module, node)
            if isinstance(node, ast.Assign) and "MODULE_ATTRS" in _assigned(node):
                exported = _lazy_export(node, name) or exported  # vLLM's lazy re-exports
            if isinstance(node, ast.ImportFrom | ast.Import):
                exported = self._imported(module, node, name) or exported
        if exported is None or exported == f"{module}.{name}":
            return None
        return self._find(exported, hops)

    def _imported(self, module: str, node: ast.ImportFrom | ast.Import, name: str) -> str | None:
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            if isinstance(node, ast.Import):
                return alias.name
            return f"{self._base(module, node)}.{alias.name}"
        return None

    def _base(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that an import names."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        drop = node.level - 1 if self._path(module).name == "__init__.py" else node.level
        return ".".join([*parts[: len(parts) - drop], *([node.module] if node.module else [])])

    def _attribute(self, place: Place, name: str, hops: int) -> Place | None:
        owner = place.node
        assert isinstance(owner, ast.ClassDef)
        for node in _statements(owner.body):
            is_method = isinstance(node, _Function | ast.ClassDef) and node.name == name
            if is_method or name in _assigned(node):
                return Place(place.module, node, owner)
        for inner in ast.walk(owner):
            if name in _assigned_to_self(inner):
                return Place(place.module, inner, owner)
        for base in owner.bases:
            path = ast.unparse(base).split("[")[0]
            tree = self._tree(place.module)
            assert tree is not None
            found = self._member(Place(place.module, tree), path.split("."), hops)
            if found is not None and isinstance(found.node, ast.ClassDef):
                inherited = self._member(found, [name], hops)
                if inherited is not None:
                    return inherited
        return None

    def _environment_variable(self, name: str) -> Place | None:
        place = self._find("vllm.envs.environment_variables", _MAX_HOPS)
        for node in ast.walk(place.node) if place is not None else ():
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        return Place("vllm.envs", value)
        return None

    def _text(self, place: Place, compared: Compared) -> str:
        node = place.node
        if compared == "source" or isinstance(node, ast.expr):
            return hashlib.sha256(_shape(_without_docstrings(node)).encode()).hexdigest()[:16]
        if compared == "presence" or isinstance(node, ast.Module):
            return "present"
        if isinstance(node, _Function):
            return _signature(node)
        if isinstance(node, ast.ClassDef):
            fields = _fields(node)
            if compared == "fields" or (fields and _is_record(node)):
                return "; ".join(fields)
            constructor = self._attribute(place, "__init__", _MAX_HOPS)
            if constructor is None or not isinstance(constructor.node, _Function):
                return "()"
            return _signature(constructor.node)
        return "present"

    def _path(self, module: str) -> Path:
        path = self._root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self._path(module)
            is_there = bool(module) and path.is_file()
            self._trees[module] = ast.parse(path.read_text("utf-8")) if is_there else None
        return self._trees[module]


def _kind(place: Place) -> str:
    if isinstance(place.node, ast.expr):
        return "environment variable"
    if isinstance(place.node, ast.Module):
        return "module"
    if isinstance(place.node, ast.ClassDef):
        return "class"
    if isinstance(place.node, _Function):
        return "function" if place.owner is None else "method"
    return "variable" if place.owner is None else "field"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also those under ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            one
            for target in node.targets
            for one in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _assigned(node: ast.AST) -> set[str]:
    return {one.id for one in _targets(node) if isinstance(one, ast.Name)}


def _assigned_to_self(node: ast.AST) -> set[str]:
    return {
        one.attr
        for one in _targets(node)
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
    }


def _lazy_export(node: ast.Assign, name: str) -> str | None:
    try:
        target = ast.literal_eval(node.value).get(name)
    except ValueError:
        return None
    return None if target is None else f"vllm{target.replace(':', '.')}"


def _signature(node: _Function) -> str:
    """Return parameters and defaults without annotations, and the kind of function."""
    arguments = copy.deepcopy(node.args)
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for one in (*every, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    kinds = [f"@{ast.unparse(one)} " for one in node.decorator_list if _is_kind(one)]
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{''.join(kinds)}{prefix}({ast.unparse(arguments)})"


def _is_kind(decorator: ast.expr) -> bool:
    return ast.unparse(decorator) in ("property", "staticmethod", "classmethod", "cached_property")


def _is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass, a struct, a model, a tuple or an enumeration."""
    marks = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
    words = ("dataclass", "config", "Struct", "BaseModel", "NamedTuple", "Enum", "Params")
    return any(word in mark for mark in marks for word in words)


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the annotated fields and the members of a class, with defaults."""
    return [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign | ast.Assign)]


def _without_docstrings(node: ast.AST) -> ast.AST:
    tree = copy.deepcopy(node)
    for one in ast.walk(tree):
        body = getattr(one, "body", None)
        if isinstance(one, _Function | ast.ClassDef | ast.Module) and isinstance(body, list):
            first = body[0] if body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                one.body = body[1:] or [ast.Pass()]
    return tree


def _shape(value: object) -> str:
    """Return a text for a syntax tree that all versions of Python write alike.

    ``ast.unparse`` and ``ast.dump`` differ between versions.
    """
    if isinstance(value, list):
        return f"[{' '.join(map(_shape, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [
        f"{name}={_shape(field)}"
        for name, field in ast.iter_fields(value)
        if field not in (None, []) and name not in ("kind", "ctx", "type_comment")
    ]
    return f"{type(value).__name__}({' '.join(fields)})"
