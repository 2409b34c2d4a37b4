"""The documentation as data: pages, headings, links, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n)\n((?: {4}.*\n)+)")
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_SHELLS = ("", "sh", "bash", "console", "shell")


@dataclass(frozen=True, slots=True)
class Page:
    """A Markdown file; ``name`` is its path from the root."""

    name: str
    text: str

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    def links(self) -> list[str]:
        """Targets of its links, as written."""
        return _LINK.findall(_INLINE.sub("", self.prose))

    def anchors(self) -> set[str]:
        """What its headings are called in links, as on GitHub."""
        return {_slug(title) for _, title in _HEADING.findall(self.prose)}

    def section(self, heading: str) -> str:
        """The text under the heading that begins so, up to the next of its level or above."""
        for match in _HEADING.finditer(self.prose):
            if match[2].startswith(heading):
                rest = self.prose[match.end() :]
                end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
                return match[0] + (rest[: end.start()] if end else rest)
        raise AssertionError(f"{self.name} has no heading {heading!r}")

    def commands(self, program: str) -> Iterator[list[str]]:
        """The words of every command line of ``program`` that it shows, without the program."""
        code = [block for kind, block in _FENCE.findall(self.text) if kind in _SHELLS]
        code += _INDENTED.findall(self.prose)
        lines = [line for block in code for line in block.splitlines()]
        lines += [one for one in _INLINE.findall(self.prose) if one.startswith(f"{program} ")]
        for line in lines:
            yield from _commands_in(line, program)


def pages() -> dict[str, Page]:
    """All pages by name: those of the root and those of ``docs``."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    names = [str(file.relative_to(ROOT)) for file in files]
    return {name: Page(name, (ROOT / name).read_text(encoding="utf-8")) for name in names}


def _commands_in(line: str, program: str) -> Iterator[list[str]]:
    for part in re.split(r"\s#\s|\||&&|;|<\(|\$\(|\)", line.replace("\\|", "/")):
        words = _words(part.split(">")[0].strip())
        while words and re.fullmatch(r"[A-Z_]+=.*|until|sudo|while", words[0]):
            words = words[1:]
        if words and words[0] == program:
            yield words[1:]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe in prose
        return text.split()


def _slug(title: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", title.lower())
    return plain.strip().replace(" ", "-")
