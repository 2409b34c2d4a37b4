"""Measure the prose of Python trees and Markdown pages: pronouns and how docstrings begin.

    python scripts/prose.py                         # this project, a line for each package
    python scripts/prose.py PATH...                 # other trees, to compare with
    python scripts/prose.py --worst 20 gpupoold     # the docstrings with the most pronouns
    python scripts/prose.py --beginnings gpupoold   # docstrings that begin with What, Whether, ...

Two figures separate readable reference documentation from riddles: the share of pronouns among
words, and the share of docstrings that begin with a relative pronoun instead of a verb or a
noun. Messages are the texts of raised errors and of log records. Exits with 1 if the docstrings,
comments and messages of all trees together, or a page, exceed ``--max-pronouns``, or if the
docstrings exceed ``--max-beginnings`` (percent).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("gpupoold", "cli/gpupool_cli", "tui/gpupool_tui", "state/gpupool_state")
PAGES = ("README.md", "docs")

_PRONOUNS = """
it its itself they them their theirs themselves those who whom whose what whatever whoever
one ones others another so nobody nothing everybody everything somebody that which
"""
# "one" before any other word is a number.
_AFTER_ONE = """
a an and are as at be before but by can does else for from goes had has if in is may must not of
on or that the then to was were when where which who whose will with without
"""
_BEGINNINGS = """
what whether where who whom whose when why how which whatever whoever of those these that it
they
"""
PRONOUNS = frozenset(_PRONOUNS.split())
BEGINNINGS = frozenset(_BEGINNINGS.split())
AFTER_ONE = frozenset(_AFTER_ONE.split())
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_PRAGMA = re.compile(r"#\s*(noqa|type:|!)")
# Code, links, and the conjunction "so that".
_NO_WORDS = re.compile(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|https?://\S+|\bso\s+that\b")
_NOT_PROSE = re.compile(r"^```[\s\S]*?^```|^(?: {4}|\t).*$", re.MULTILINE)
_LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


@dataclass(frozen=True, slots=True)
class Text:
    """A docstring, a comment, a message or a paragraph, with the line where the text begins."""

    file: Path
    line: int
    words: tuple[str, ...]

    @property
    def num_pronouns(self) -> int:
        """Number of words that are pronouns."""
        following = (*self.words[1:], "")
        return sum(
            word in PRONOUNS and (word != "one" or not after or after in AFTER_ONE)
            for word, after in zip(self.words, following, strict=True)
        )

    @property
    def begins_badly(self) -> bool:
        """Whether the first word is in ``BEGINNINGS``."""
        return bool(self.words) and self.words[0] in BEGINNINGS

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.words[:14])}"


@dataclass(slots=True)
class Figures:
    """Counts over texts of one kind."""

    texts: list[Text] = field(default_factory=list)

    @property
    def num_words(self) -> int:
        """Words of all texts."""
        return sum(len(text.words) for text in self.texts)

    @property
    def pronoun_percent(self) -> float:
        """Pronouns among the words, in percent."""
        return 100 * sum(text.num_pronouns for text in self.texts) / max(1, self.num_words)

    @property
    def beginning_percent(self) -> float:
        """Texts that begin with a word of ``BEGINNINGS``, in percent."""
        return 100 * sum(text.begins_badly for text in self.texts) / max(1, len(self.texts))


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case, without code and links."""
    return tuple(word.lower() for word in _WORD.findall(_NO_WORDS.sub(" ", text)))


def docstrings(file: Path) -> Iterator[Text]:
    """Yield the docstrings of a module, its classes and functions, and those after fields."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for child in getattr(node, "body", ()) if isinstance(node, _BODIES) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                text = child.value.value
                if isinstance(text, str) and (words := words_of(text)):
                    yield Text(file, child.lineno, words)


_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def comments(file: Path) -> Iterator[Text]:
    """Yield the comments of a module; pragmas are left out."""
    source = io.StringIO(file.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        is_prose = token.type == tokenize.COMMENT and not _PRAGMA.match(token.string)
        if is_prose and (words := words_of(token.string)):
            yield Text(file, token.start[0], words)


def messages(file: Path) -> Iterator[Text]:
    """Yield the texts of raised errors and of log records."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not (call is not node or _is_log(call)):
            continue
        for argument in call.args:
            text = " ".join(_literals(argument))
            if words := words_of(text):
                yield Text(file, call.lineno, words)


def _is_log(call: ast.Call) -> bool:
    method = call.func
    return (
        isinstance(method, ast.Attribute)
        and method.attr in _LOG_METHODS
        and isinstance(method.value, ast.Name)
        and method.value.id.endswith("logger")
    )


def _literals(argument: ast.expr) -> Iterator[str]:
    """Yield the literal parts of a string or an f-string."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
    elif isinstance(argument, ast.JoinedStr):
        for part in argument.values:
            yield from _literals(part)


def page(file: Path) -> Iterator[Text]:
    """Yield the paragraphs and tables of a Markdown page, without code blocks."""
    prose = _NOT_PROSE.sub("", file.read_text(encoding="utf-8"))
    for paragraph in re.split(r"\n\s*\n", prose):
        if words := words_of(paragraph):
            yield Text(file, 1, words)


def python_files(tree: Path) -> list[Path]:
    """Return the Python files of a tree, or a file itself."""
    return [tree] if tree.is_file() else sorted(tree.rglob("*.py"))


@dataclass(slots=True)
class Package:
    """Figures of a package's texts."""

    docstrings: Figures = field(default_factory=Figures)
    comments: Figures = field(default_factory=Figures)
    messages: Figures = field(default_factory=Figures)

    def add(self, file: Path) -> None:
        """Add the texts of a module."""
        self.docstrings.texts += docstrings(file)
        self.comments.texts += comments(file)
        self.messages.texts += messages(file)

    @property
    def all(self) -> Figures:
        """Figures of all texts together."""
        return Figures([*self.docstrings.texts, *self.comments.texts, *self.messages.texts])

    def row(self, name: str) -> str:
        """Return the package's line of the table."""
        return (
            f"{name:34} {len(self.docstrings.texts):10} {self.docstrings.pronoun_percent:8.1f}% "
            f"{self.docstrings.beginning_percent:9.1f}% {self.comments.pronoun_percent:8.1f}% "
            f"{self.messages.pronoun_percent:8.1f}% {self.all.pronoun_percent:6.1f}%"
        )


def packages(trees: Sequence[Path]) -> dict[str, Package]:
    """Return the figures of each package of each tree, by name."""
    found: dict[str, Package] = {}
    for tree in trees:
        for file in python_files(tree):
            inner = file.relative_to(tree).parts if tree.is_dir() else ()
            name = tree.name + (f"/{inner[0]}" if len(inner) > 1 else "")
            found.setdefault(name, Package()).add(file)
    return found


def print_table(trees: Sequence[Path]) -> Package:
    """Print a line for each package; return the figures of all packages together."""
    title = f"{'package':34} {'docstrings':>10} {'pronouns':>9} {'beginnings':>10} "
    print(f"{title}{'comments':>9} {'messages':>9} {'all':>7}")
    total = Package()
    for name, package in packages(trees).items():
        print(package.row(name))
        for ours, theirs in (
            (total.docstrings, package.docstrings),
            (total.comments, package.comments),
            (total.messages, package.messages),
        ):
            ours.texts += theirs.texts
    print(total.row("all"))
    return total


def print_pages(paths: Iterable[Path]) -> float:
    """Print a line for each Markdown page; return the largest share of pronouns in percent."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.md"))]
    largest = 0.0
    for file in sorted(files):
        figures = Figures(list(page(file)))
        print(f"{file.name:34} {figures.num_words:10} {figures.pronoun_percent:8.1f}%")
        largest = max(largest, figures.pronoun_percent)
    return largest


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("trees", nargs="*", type=Path, help="default: this project")
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    parser.add_argument("--beginnings", action="store_true")
    parser.add_argument("--max-pronouns", type=float, default=100.0, metavar="PERCENT")
    parser.add_argument("--max-beginnings", type=float, default=100.0, metavar="PERCENT")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return the exit status."""
    given = _parse(arguments)
    total = print_table(given.trees or [ROOT / tree for tree in TREES])
    page_percent = 0.0 if given.trees else print_pages(ROOT / path for path in PAGES)
    by_share = sorted(total.all.texts, key=lambda text: text.num_pronouns, reverse=True)
    for text in by_share[: given.worst]:
        print(text)
    for text in total.docstrings.texts if given.beginnings else ():
        if text.begins_badly:
            print(text)
    pronoun_percent = max(total.all.pronoun_percent, page_percent)
    is_over = (
        pronoun_percent > given.max_pronouns
        or total.docstrings.beginning_percent > given.max_beginnings
    )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
