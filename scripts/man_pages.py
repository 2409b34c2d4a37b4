"""Write the manual pages of ``gpupool``, of each of its commands, and of ``gpupoold``.

    python scripts/man_pages.py FOLDER

The pages are made from the help of the programs: ``FOLDER/man1/gpupool.1``,
``FOLDER/man1/gpupool-COMMAND.1`` and ``FOLDER/man8/gpupoold.8``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from gpupool_cli.main import app
from gpupoold import __version__
from gpupoold.service import argument_parser

_CODE = re.compile(r"(`{1,2})([^`]+)\1")
_DAEMON_SECTIONS = {
    "EXIT STATUS": """
        0: stopped by a signal. 1: the start or the daemon failed. 2: the configuration is wrong.
        5: refused; another daemon uses the same folders, or a newer gpupool wrote the database.
        """,
    "SIGNALS": """
        SIGTERM and SIGINT stop the daemon in order; open streams may end for up to
        `limits.stop_grace`. SIGHUP reads the configuration again.
        """,
    "FILES": """
        `/etc/gpupool/gpupool.toml`: the configuration, with every key at its default.

        `/var/lib/gpupool`: database, downloaded models, logs.

        `/run/gpupool/admin.sock`: the socket of `gpupool`.
        """,
}


def main() -> None:
    """Write all pages into the folder that the command line names."""
    folder = Path(sys.argv[1])
    for name, text in pages():
        path = folder / f"man{name[-1]}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the file name and the roff source of every page."""
    root: Any = get_command(app)
    for words, command in _commands(root, ("gpupool",)):
        yield f"{'-'.join(words)}.1", _command_page(words, command)
    yield "gpupoold.8", _daemon_page(argument_parser())


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _commands(inner, (*words, name))


def _command_page(words: tuple[str, ...], command: Any) -> str:
    name, help_text = "-".join(words), inspect.cleandoc(command.help or "")
    context = typer.Context(command, info_name=" ".join(words))
    usage = " ".join([" ".join(words), *command.collect_usage_pieces(context)])
    records = [param.get_help_record(context) for param in command.params]
    options = [record for record in records if record and record[0].startswith("-")]
    arguments = [record for record in records if record and not record[0].startswith("-")]
    inner = [
        (f"{name}-{key}(1)", _summary(one.help))
        for key, one in getattr(command, "commands", {}).items()
        if not one.hidden
    ]
    parts = [
        _head(name, 1, _summary(help_text)),
        _section("SYNOPSIS", f".B {_escaped(usage)}\n"),
        _section("DESCRIPTION", _paragraphs(help_text)),
        _section("ARGUMENTS", _terms(arguments)),
        _section("OPTIONS", _terms(options)),
        _section("COMMANDS", _terms(inner)),
        _section("NOTES", _paragraphs(command.epilog or "")),
        _section("SEE ALSO", _paragraphs(", ".join(_related(words)))),
    ]
    return "".join(parts)


def _daemon_page(parser: argparse.ArgumentParser) -> str:
    # argparse has no public list of its options.
    options = [
        (" ".join([", ".join(action.option_strings), *_metavar(action)]), action.help or "")
        for action in parser._actions
    ]
    description = parser.description or ""
    usage = parser.format_usage().removeprefix("usage: ")
    parts = [
        _head("gpupoold", 8, _summary(description)),
        _section("SYNOPSIS", f".B {_escaped(' '.join(usage.split()))}\n"),
        _section("DESCRIPTION", _paragraphs(description)),
        _section("OPTIONS", _terms(options)),
        *(_section(title, _paragraphs(text)) for title, text in _DAEMON_SECTIONS.items()),
        _section("SEE ALSO", _paragraphs("gpupool(1), systemctl(1)")),
    ]
    return "".join(parts)


def _metavar(action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    return [str(action.metavar or action.dest.upper())]


def _related(words: tuple[str, ...]) -> list[str]:
    above = ["-".join(words[:length]) + "(1)" for length in range(1, len(words))]
    return [*above, "gpupoold(8)"]


def _summary(text: str | None) -> str:
    """Return the first sentence, without a full stop, on one line."""
    first = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"\.(?: |$)", first)[0]


def _head(name: str, number: int, summary: str) -> str:
    title = f'.TH "{_escaped(name.upper())}" {number} "" "gpupool {__version__}" "gpupool"\n'
    return title + _section("NAME", f"{_escaped(name)} \\- {_text(summary)}\n")


def _section(title: str, body: str) -> str:
    return f".SH {title}\n{body}" if body else ""


def _paragraphs(text: str) -> str:
    blocks = [" ".join(block.split()) for block in inspect.cleandoc(text).split("\n\n")]
    return "".join(f".PP\n{_text(block)}\n" for block in blocks if block)


def _terms(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f".TP\n.B {_escaped(term)}\n{_text(text)}\n" for term, text in rows)


def _text(text: str) -> str:
    """Return a line of roff, with code in bold type."""
    line = _CODE.sub(r"\\fB\2\\fR", _escaped(text))
    return f"\\&{line}" if line.startswith((".", "'")) else line


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")


if __name__ == "__main__":
    main()
