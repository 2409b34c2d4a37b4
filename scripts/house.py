"""Report the width of the product: lines, modules, importers, constructors, records.

    python -m scripts.house                # this checkout
    python -m scripts.house COMMIT         # a commit of this repository
    python -m scripts.house --list short   # short records constructors files: each by name

Counts are made over the syntax trees; nothing is imported. The product is ``gpupoold``,
``cli``, ``tui`` and ``state``; its core is without the simulator, the simulated device and the
fleet. A module's importers are the other modules of the product that import the module or a name
of the module, at any depth; an ``__init__`` file imports, and is not counted itself.

``short`` lists modules with one importer and fewer than 110 lines that stand in the package of
this importer, ``records`` pairs of record classes (dataclasses, msgspec structs, pydantic models)
that share 5 field names and 55 % of the fields of the smaller.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# Packages by the folder to which their module names are relative.
TREES = {"gpupoold": "", "gpupool_cli": "cli", "gpupool_tui": "tui", "gpupool_state": "state"}
OUTSIDE_CORE = ("gpupoold.sim", "gpupoold.simdevice", "gpupoold.fleet")

SHORT_LINES = 110
LONG_LINES = 600
MANY_PARAMETERS = 8
SHARED_FIELDS = 5
SHARED_PART = 0.55

_RECORD_BASES = frozenset({"BaseModel", "Struct"})


@dataclass(frozen=True)
class Module:
    """A file of the product by its module name."""

    name: str
    is_package: bool
    text: str

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def nodes(self) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
        """The imports and classes, at any depth."""
        kinds = ast.Import | ast.ImportFrom | ast.ClassDef
        return [node for node in ast.walk(ast.parse(self.text)) if isinstance(node, kinds)]

    def imported(self) -> Iterator[str]:
        """Full names of imported modules, and of names that may be modules."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class Record:
    """A record class with the names of its own fields."""

    name: str
    fields: frozenset[str]


class House:
    """The modules of the product, by name, and what a report says of them."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The importers of each counted module."""
        importers: dict[str, set[str]] = {
            name: set() for name, module in self.modules.items() if not module.is_package
        }
        for module in self.modules.values():
            for name in module.imported():
                if name in importers and name != module.name:
                    importers[name].add(module.name)
        return importers

    def single_importer(self) -> dict[str, str]:
        """The only importer of each module that has one."""
        return {name: min(by) for name, by in self.importers.items() if len(by) == 1}

    def short(self) -> dict[str, str]:
        """Short modules beside their only importer, with the importer."""
        return {
            name: importer
            for name, importer in self.single_importer().items()
            if self.modules[name].num_lines < SHORT_LINES
            and self.modules[name].package == self.modules[importer].package
        }

    def constructors(self) -> dict[str, int]:
        """Parameters of each constructor with many, ``self`` not counted."""
        found = {}
        for module, node in self._classes():
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    args = method.args
                    count = len(args.posonlyargs + args.args + args.kwonlyargs) - 1
                    if count >= MANY_PARAMETERS:
                        found[f"{module.name}.{node.name}"] = count
        return found

    def records(self) -> list[Record]:
        classes = list(self._classes())
        record_names = set(_RECORD_BASES)
        while True:  # subclasses of records, in whatever order the files stand
            more = {
                node.name
                for _, node in classes
                if node.name not in record_names
                and any(_last_name(base) in record_names for base in node.bases)
            }
            if not more:
                break
            record_names |= more
        return [
            Record(f"{module.name}.{node.name}", _fields(node))
            for module, node in classes
            if node.name in record_names or _is_dataclass(node)
        ]

    def record_pairs(self) -> list[tuple[Record, Record]]:
        """Pairs of records that look like two descriptions of one thing."""
        return [
            (first, second)
            for first, second in combinations(self.records(), 2)
            if (shared := len(first.fields & second.fields)) >= SHARED_FIELDS
            and shared >= SHARED_PART * min(len(first.fields), len(second.fields))
        ]

    def num_lines(self, *, core: bool = False) -> int:
        return sum(
            module.num_lines for module in self.modules.values() if not core or _is_core(module)
        )

    def long_files(self) -> dict[str, int]:
        return {
            name: module.num_lines
            for name, module in self.modules.items()
            if module.num_lines > LONG_LINES
        }

    def _classes(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    yield module, node


def read_checkout() -> House:
    """Read the files of this checkout."""
    return _house(
        (path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
        for package, folder in TREES.items()
        for path in sorted((ROOT / folder / package).rglob("*.py"))
    )


def read_commit(commit: str) -> House:
    """Read the files of a commit, which git names."""
    folders = [(PurePosixPath(folder) / package).as_posix() for package, folder in TREES.items()]
    packed = subprocess.run(
        ["git", "archive", commit, *folders], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return _house(
            (member.name, file.read().decode())
            for member in archive
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None
        )


def _house(files: Iterator[tuple[str, str]]) -> House:
    modules = {}
    for path, text in files:
        parts = PurePosixPath(path).with_suffix("").parts
        name = ".".join(parts if parts[0] in TREES else parts[1:])
        module = Module(name.removesuffix(".__init__"), name.endswith(".__init__"), text)
        modules[module.name] = module
    return House(modules)


def _is_core(module: Module) -> bool:
    return not f"{module.name}.".startswith(tuple(f"{name}." for name in OUTSIDE_CORE))


def _last_name(node: ast.expr) -> str:
    """Return ``Struct`` for ``msgspec.Struct``, ``X`` for ``X[int]``."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return ast.unparse(node).rpartition(".")[2]


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(_last_name(decorator) == "dataclass" for decorator in node.decorator_list)


def _fields(node: ast.ClassDef) -> frozenset[str]:
    return frozenset(
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and _last_name(field.annotation) != "ClassVar"
    )


def _listed_short(house: House) -> Iterator[str]:
    for name, importer in sorted(house.short().items()):
        yield f"{house.modules[name].num_lines:4} {name} <- {importer}"


def _listed_constructors(house: House) -> Iterator[str]:
    for name, count in sorted(house.constructors().items(), key=lambda row: -row[1]):
        yield f"{count:4} {name}"


def _listed_records(house: House) -> Iterator[str]:
    for first, second in house.record_pairs():
        shared = len(first.fields & second.fields)
        yield (
            f"{shared:4} of {len(first.fields)} and {len(second.fields)}: "
            f"{first.name}, {second.name}"
        )


def _listed_files(house: House) -> Iterator[str]:
    for name, count in sorted(house.long_files().items(), key=lambda row: -row[1]):
        yield f"{count:4} {name}"


LISTS: dict[str, Callable[[House], Iterator[str]]] = {
    "short": _listed_short,
    "constructors": _listed_constructors,
    "records": _listed_records,
    "files": _listed_files,
}


def report(house: House) -> Iterator[str]:
    """Yield a line for each figure."""
    single = house.single_importer()
    in_core = [name for name in house.importers if _is_core(house.modules[name])]
    trees = Counter[str]()
    for module in house.modules.values():
        trees[module.name.partition(".")[0]] += module.num_lines
    short = f"of these < {SHORT_LINES} lines, beside their importer"
    pairs = f"record pairs (>= {SHARED_FIELDS} shared fields, >= {SHARED_PART:.0%} of the smaller)"
    figures = {
        "product lines": house.num_lines(),
        **{f"  {tree}": trees[tree] for tree in TREES},
        "core lines (no sim, simdevice, fleet)": house.num_lines(core=True),
        "modules": len(house.importers),
        "  of the core": len(in_core),
        "modules with one importer": len(single),
        f"  {short}": len(house.short()),
        f"constructors with >= {MANY_PARAMETERS} parameters": len(house.constructors()),
        "record classes": len(house.records()),
        f"  {pairs}": len(house.record_pairs()),
        f"files over {LONG_LINES} lines": len(house.long_files()),
    }
    for name, count in figures.items():
        yield f"{name:<64}{count:>8,}"


def main() -> None:
    """Print the report, or the list that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", help="a commit instead of the checkout")
    parser.add_argument("--list", choices=LISTS, help="name each instead of the figures")
    arguments = parser.parse_args()
    house = read_commit(arguments.commit) if arguments.commit else read_checkout()
    for line in LISTS[arguments.list](house) if arguments.list else report(house):
        print(line)


if __name__ == "__main__":
    main()
