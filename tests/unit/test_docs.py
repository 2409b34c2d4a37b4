"""The documentation is complete and true: commands, options, settings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from gpupool_cli.main import app
from tests.unit.doc_pages import ROOT, Page, pages

PAGES = pages()
# Of other programs, or of every command.
_COMMON_OPTIONS = {"--help", "-h"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words; groups are none."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, (*path, name))


ROOT_COMMAND: Any = get_command(app)
COMMANDS = dict(commands(ROOT_COMMAND))


def options_of(command: Any) -> set[str]:
    """All spellings of a command's options."""
    spellings = {one for param in command.params for one in (*param.opts, *param.secondary_opts)}
    return {one for one in spellings if one.startswith("-")}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_and_option_has_a_help(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert command.help
    for param in command.params:
        assert param.help, f"{path}: {param.name} has no help"


def resolve(words: list[str]) -> tuple[tuple[str, ...], Any] | None:
    """The command that is meant by the words of a command line; None: there is none."""
    command, path = ROOT_COMMAND, []
    words = _without_options(words)
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return None
        path.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    return tuple(path), command


def _without_options(words: list[str]) -> list[str]:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if rest[0] == "--socket" else rest[1:]
    return rest


def test_shown_commands_are_found() -> None:
    readme = list(PAGES["README.md"].commands("gpupool"))
    assert ["add-model", "qwen-7b", "--ttft", "10s", "--tbt", "100ms"] in readme
    assert resolve(["cache", "pin", "a"]) == (("cache", "pin"), COMMANDS["cache", "pin"])
    assert resolve(["cache", "no-such"]) is None


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_are_shown_exist(name: str) -> None:
    for words in PAGES[name].commands("gpupool"):
        shown = f"{name}: gpupool {' '.join(words)}"
        names = _without_options(words)
        if not names or not re.fullmatch(r"[a-z][a-z-]*", names[0]):
            continue  # the program as such, or with a placeholder
        group = ROOT_COMMAND.commands.get(names[0])
        assert group is not None, shown
        if hasattr(group, "commands") and (len(names) == 1 or "/" in names[1]):
            continue  # the group as such
        found = resolve(words)
        assert found is not None, shown
        told = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert told <= options_of(found[1]) | options_of(ROOT_COMMAND) | _COMMON_OPTIONS, shown


@pytest.mark.parametrize("name", PAGES)
def test_make_targets_that_are_shown_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in PAGES[name].commands("make"):
        named = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
        assert set(named) <= targets, f"{name}: make {' '.join(words)}"


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for link in PAGES[name].links():
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (folder / file).resolve() if file else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if anchor and target.suffix == ".md":
            page = Page(link, target.read_text(encoding="utf-8"))
            assert anchor in page.anchors(), f"{name}: {link}"


@pytest.mark.parametrize("name", PAGES)
def test_modules_that_are_named_exist(name: str) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/*.py")}
    files = {file for file in files if not file.startswith("build/")}
    ends = {"/".join(file.split("/")[n:]) for file in files for n in range(file.count("/") + 1)}
    named = set(re.findall(r"(?<![<\w/])[a-z_]\w*(?:/\w+)*\.py\b", PAGES[name].text))
    assert named <= ends


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, to_read = {"README.md"}, ["README.md"]
    while to_read:
        name = to_read.pop()
        for link in PAGES[name].links():
            target = (ROOT / name).parent / link.partition("#")[0]
            found = next((one for one in PAGES if ROOT / one == target.resolve()), None)
            if found is not None and found not in reached:
                reached.add(found)
                to_read.append(found)
    assert reached >= {name for name in PAGES if name.startswith("docs/")}
