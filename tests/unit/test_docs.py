"""The documentation is complete and true: commands, options, settings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from gpupool_cli.main import app
from gpupoold.config.schema import sections
from gpupoold.config.values import effect_of
from tests.unit.doc_pages import ROOT, Page, pages

PAGES = pages()
CLI = PAGES["docs/cli.md"]
# Hidden commands, which the page of another one names.
ALIASES: dict[tuple[str, ...], tuple[str, ...]] = {("ls",): ("list",)}
CONFIGURATION = PAGES["docs/configuration.md"]
EFFECTS = {
    "live": "at once",
    "loads": "by models loaded from then on",
    "restart": "after a restart of gpupoold",
}
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


def section_of(path: tuple[str, ...]) -> str:
    """Where a command is documented: under its own heading, or in its group's table."""
    path = ALIASES.get(path, path)
    for length in range(len(path), 0, -1):
        heading = f"`gpupool {' '.join(path[:length])}"
        if f"\n### {heading}" in CLI.text:
            return CLI.section(heading)
    raise AssertionError(f"docs/cli.md has no heading `gpupool {' '.join(path)}`")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_is_documented_with_its_options(path: tuple[str, ...]) -> None:
    text = section_of(path)
    assert re.search(rf"`gpupool {' '.join(path)}[ `]", text)
    command = COMMANDS[path]
    assert command.help
    for param in command.params:
        long = [one for one in param.opts if one.startswith("--")]
        assert param.help, f"{path}: {param.name} has no help"
        for option in long:
            assert f"{option}" in text, f"gpupool {' '.join(path)} {option} is not in docs/cli.md"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_option_is_documented_that_is_not_there(path: tuple[str, ...]) -> None:
    # Of a group's table the command's row, else the whole section.
    text = section_of(path)
    rows = [line for line in text.splitlines() if f"| `gpupool {' '.join(path)}" in line]
    own = "\n".join(rows) or text
    known = options_of(COMMANDS[path]) | options_of(ROOT_COMMAND) | _COMMON_OPTIONS
    if not rows:
        inner = [one for other, one in COMMANDS.items() if other[: len(path)] == path]
        known |= {option for one in inner for option in options_of(one)}
    # Options of the other commands that an example pipes into or prose points to.
    for words in CLI.commands("gpupool"):
        if (found := resolve(words)) and found[0] != path:
            known |= options_of(found[1])
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", own))
    assert told <= known


def test_every_option_of_the_program_is_documented() -> None:
    text = CLI.section("Global options")
    for param in ROOT_COMMAND.params:
        for option in param.opts:
            assert f"`{option}" in text


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
    assert ["run", "qwen-7b", "-", "--system", "Review this change"] in CLI.commands("gpupool")
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


@pytest.mark.parametrize(
    "name", sorted(PAGES.keys() - {"docs/internals/judge.md"})
)  # which names vLLM's files
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


def test_when_each_key_is_heeded_is_documented() -> None:
    told = {}
    for heeded, keys in re.findall(
        r"^\| ([a-z][^|]*) \| (`[^|]*) \|$", CONFIGURATION.section("Look, check"), re.MULTILINE
    ):
        for key in re.findall(r"`([^`]+)`", keys):
            told[key] = heeded
    expected = {}
    for section, kind in sections().items():
        for name, field in kind.model_fields.items():
            expected[f"{section}.{field.alias or name}"] = EFFECTS[effect_of(field, kind)]
    for wild in [key for key in told if key.endswith(".*")]:
        heeded = told.pop(wild)
        told |= {key: heeded for key in expected if key.startswith(wild[:-1])}
    assert told == expected


def test_options_of_the_daemon_are_documented() -> None:
    source = (ROOT / "gpupoold" / "service.py").read_text()
    options = set(re.findall(r'"(--[a-z-]+)"', source)) - {"--version"}
    assert "--config" in options
    for option in options:
        assert option in CONFIGURATION.text
