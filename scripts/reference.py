"""Write the pages of ``docs/reference`` from the code: commands, settings, metrics, operations.

    python -m scripts.reference [--check]

``--check`` writes nothing and exits with status 1 if a page is out of date. A setting's meaning is
the text below its field in ``gpupoold/config``; the other pages have the texts that the program
itself shows: help of commands, ``# HELP`` of metrics, summaries of the admin API.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from pydantic.fields import FieldInfo
from typer.main import get_command

from gpupool_cli.main import app
from gpupoold.api.admin_api import OPERATIONS, AdminApi
from gpupoold.config.schema import sections
from gpupoold.config.values import Effect, Section, effect_of
from gpupoold.metrics.device_families import daemon_families, device_families
from gpupoold.metrics.exposition import picker_families
from gpupoold.metrics.families import Family, Numbers
from gpupoold.metrics.model_families import model_families
from gpupoold.service import argument_parser

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"

_MADE = "This page is made from the code by `make reference`."
_EFFECTS = {Effect.LIVE: "at once", Effect.LOADS: "next loads", Effect.RESTART: "restart"}
_FAMILIES = {
    "Models": model_families,
    "Devices, turns and switches": device_families,
    "The daemon": daemon_families,
    "Endpoint pickers": picker_families,
}


class Nothing:
    """An object without content: every attribute and call is empty, every number 0.

    In place of a running daemon's objects: the names and texts of metrics depend on none of their
    values.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **options: object) -> Any:
        return self

    def __getitem__(self, key: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __add__(self, other: object) -> Any:
        return other

    __radd__ = __sub__ = __rsub__ = __add__


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    return {
        "commands.md": commands_page(),
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "operations.md": operations_page(),
    }


def commands_page() -> str:
    """Return the page of all commands with their options.

    Commands without options of their own have a row, other commands also a section.
    """
    root: Any = get_command(app)
    found = {" ".join(words): command for words, command in _commands(root, ("gpupool",))}
    shared = _shared_options(found)
    rows, sections = [], []
    for name, command in found.items():
        usage, texts = _usage(name, command, shared), _blocks(command.help)
        own = [(f"`{term}`", text) for term, text in _records(command) if shared.get(term) != text]
        if own:
            title = name.removeprefix("gpupool ")
            shown = f"[`{title}`](#{title.replace(' ', '-')})"
            summary = _summary(command.help)
            rows.append((shown, summary))
            texts = [text for text in texts if text.rstrip(".") != summary]
            texts += [*_blocks(command.epilog), _list(own)]
            sections.append("\n\n".join([f"## {title}", f"    {usage}", *texts]))
        else:
            rows.append((f"`{usage.removeprefix('gpupool ')}`", " ".join(texts).rstrip(".")))
    parser = argument_parser()
    # argparse has no public list of its options.
    options = [(f"`{', '.join(one.option_strings)}`", one.help or "") for one in parser._actions]
    return "\n".join(
        [
            f"# Commands\n\n{_MADE} `gpupool COMMAND --help` and `man gpupool-COMMAND` have the "
            "same texts. [Models](../adding-models.md) and [operations](../operations.md) say "
            "when to use which.\n",
            f"{root.epilog}\n",
            "Options of `gpupool` itself stand before the command:\n",
            _list((f"`{term}`", text) for term, text in _records(root)),
            "Arguments and options of several commands. All commands have `--help`:\n",
            _list((f"`{term}`", text) for term, text in shared.items()),
            "A command with a link has further arguments or options:\n",
            _list(rows),
            *sections,
            f"## gpupoold\n\n{parser.description}\n",
            _list(options),
        ]
    )


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in command.commands.items():
        if inner.hidden:
            continue
        if hasattr(inner, "commands"):
            yield from _commands(inner, (*words, name))
        else:
            yield (*words, name), inner


def _shared_options(found: dict[str, Any]) -> dict[str, str]:
    """Return the options and arguments of several commands that mean the same."""
    counts = Counter(record for command in found.values() for record in _records(command))
    shared: dict[str, str] = {}
    # Of two meanings of a term the frequent meaning comes first.
    for (term, text), count in counts.most_common():
        if count > 1:
            shared.setdefault(term, text)
    return shared


def _usage(name: str, command: Any, shared: dict[str, str]) -> str:
    """Return a command with its needed and shared options, and its arguments."""
    needed, others, arguments = [], [], []
    has_own = False
    for param in command.params:
        for term, text in _records_of(command, param):
            if not term.startswith("-"):
                arguments.append(term if param.required else f"[{term}]")
            elif param.required:
                needed.append(term)
            elif shared.get(term) == text:
                others.append(f"[{term.rpartition(', ')[2]}]")
            else:
                has_own = True
    return " ".join([name, *needed, *others, *(["[OPTIONS]"] if has_own else []), *arguments])


def _records(command: Any) -> list[tuple[str, str]]:
    """Return arguments and options of a command with their meanings."""
    return [record for param in command.params for record in _records_of(command, param)]


def _records_of(command: Any, param: Any) -> list[tuple[str, str]]:
    """Return a parameter without what the usage says: types of arguments, and necessity."""
    if not (record := param.get_help_record(typer.Context(command))):
        return []
    term, text = record
    if not term.startswith("-"):
        term = re.sub(r"[][]", "", term.partition(" <")[0])
    term = re.sub(r"<\w+ range>|<int>", "N", term)
    term = re.sub(r"--(\w+) <(?:str|float)>", lambda one: f"--{one[1]} {one[1].upper()}", term)
    return [(term, re.sub(r" \[(?:required|x>=[01](?:; required)?)\]|; x>=[01](?=\])", "", text))]


def settings_page() -> str:
    """Return the page of all keys of the configuration."""
    parts = [
        f"# Settings\n\n{_MADE} Keys of the configuration file, with defaults. "
        "[Configuration](../configuration.md) says how to write and change the file, and what "
        "the sizes and durations look like.\n\n"
        "A change takes effect after a restart of gpupoold, unless the section says `at once` (by "
        "`gpupool reload`) or `next loads` (models loaded after the reload).\n"
    ]
    for name, kind in sections().items():
        title = f"[[{name}]]" if name == "device" else f"[{name}]"
        fields = kind.model_fields
        rows = [
            (f"`{field.alias or key}`", _default(kind, field, key), _texts(kind).get(key, ""))
            for key, field in fields.items()
        ]
        table = _table(("key", "default", "meaning"), rows)
        parts.append(f"## {title}\n\n{_effects(kind)}{table}")
    return "\n".join(parts)


def _effects(kind: type[Section]) -> str:
    """Return the effect of most keys of a section and other keys by effect, if not a restart."""
    keys: dict[str, list[str]] = {}
    for key, field in kind.model_fields.items():
        keys.setdefault(_EFFECTS[effect_of(field, kind)], []).append(f"`{field.alias or key}`")
    usual = max(keys, key=lambda effect: len(keys[effect]))
    others = [f"{effect}: {', '.join(keys[effect])}" for effect in keys if effect != usual]
    said = "; ".join(others if usual == "restart" else [usual, *others])
    return f"{said[0].upper()}{said[1:]}.\n\n" if said else ""


def _default(kind: type[Section], field: FieldInfo, key: str) -> str:
    if field.is_required():
        return "by user" if kind.__name__ == "PathSettings" else "required"
    value = field.get_default(call_default_factory=False)
    if value is None:
        return '`"auto"`' if key.endswith("_or_auto") else "none"
    shown = kind.__pydantic_serializer__.to_python(
        kind.model_construct(**{key: value}), mode="json", include={key}, warnings=False
    )[key]
    return f"`{_toml(shown)}`"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@cache
def _texts(kind: type[Section]) -> dict[str, str]:
    """Return the text below each field of a section's class."""
    tree = ast.parse(inspect.getsource(kind))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = inspect.cleandoc(str(text))
    return found


def metrics_page() -> str:
    """Return the page of all metrics."""
    parts = [
        f"# Metrics\n\n{_MADE} `/metrics` has the same texts. [Metrics](../metrics.md) says how "
        "to scrape, what the values of the labels mean, and has useful queries.\n\n"
        "Labels are in braces. Names with `_total` are counters, unmarked names are gauges.\n"
    ]
    nothing: Any = Nothing()
    for title, families in _FAMILIES.items():
        # Rows made of nothing have no values.
        found = [(_without_rows(one).metric(), one.labels) for one in families(nothing)]
        parts.append(f"## {title}\n\n{_metrics(found)}")
    process = [(one, ()) for one in REGISTRY.collect() if one.name.startswith("process_")]
    parts.append(f"## The daemon's process\n\n{_metrics(process)}")
    return "\n".join(parts)


def _without_rows(family: Family) -> Family:
    if isinstance(family, Numbers):
        return replace(family, rows=[])
    return replace(family, rows=[])


def _metrics(found: Sequence[tuple[Metric, Sequence[str]]]) -> str:
    common = set.intersection(*(set(labels) for _, labels in found))
    said = "".join(f"All have the label `{label}`.\n\n" for label in sorted(common))
    rows = [
        (_metric(metric, sorted({*labels} - common)), metric.documentation.rstrip("."))
        for metric, labels in found
    ]
    return f"{said}{_list(rows)}"


def _metric(metric: Metric, labels: Sequence[str]) -> str:
    total = "_total" if metric.type == "counter" else ""
    braces = f"{{{', '.join(labels)}}}" if labels else ""
    histogram = " (histogram)" if metric.type == "histogram" else ""
    return f"`{metric.name}{total}{braces}`{histogram}"


def operations_page() -> str:
    """Return the page of the admin API's operations."""
    rows = []
    for one in OPERATIONS.values():
        body, query = "", []
        for parameter in one.parameters:
            if parameter.name == "body":
                body = f"`{parameter.annotation.__name__}`"
            elif parameter.name not in one.path_names:
                query.append(f"`{parameter.name}`")
        purpose = (getattr(AdminApi, one.name).__doc__ or one.name).split("\n\n")[0]
        answer = f"lines of {_type(one.answer)}" if one.is_stream else _type(one.answer)
        asked = body or (f"?{', '.join(query)}" if query else "")
        rows.append((f"`{one.method} {one.path}`", purpose.rstrip("."), asked, answer))
    head = ("operation", "purpose", "body, or ? and query", "answer")
    parts = [
        f"# Operations of the admin API\n\n{_MADE} The daemon answers on its admin socket: "
        "`curl --unix-socket /run/gpupool/admin.sock http://gpupoold/ps`. `gpupool` uses these "
        "operations, and the JSON of its commands has the same names. Times are in seconds, "
        "sizes in bytes; `/openapi.json` describes all bodies and answers.\n",
        _table(head, rows),
    ]
    return "\n".join(parts)


def _type(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    name = getattr(kind, "__name__", str(kind))
    return "" if name == "NoneType" else f"`{name}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("-",) * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(one) for one in line)} |\n" for line in lines)


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- {term}: {_line(text)}\n" for term, text in rows)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", _line(text))


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _blocks(text: str | None) -> list[str]:
    """Return the paragraphs of a text, each on a line."""
    blocks = inspect.cleandoc(text or "").split("\n\n")
    return [" ".join(block.replace("``", "`").split()) for block in blocks if block]


def _summary(text: str | None) -> str:
    return re.split(r"\.(?: |$)", " ".join((text or "").split("\n\n")[0].split()))[0]


def main() -> int:
    """Write or check the pages; return the exit status."""
    outdated = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated.append(name)
            if "--check" not in sys.argv:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    print(f"{len(outdated)} pages changed: {', '.join(outdated)}" if outdated else "up to date")
    return 1 if outdated and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
