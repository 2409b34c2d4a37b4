"""All that is wrong in a file at once, each with its line; and which keys a file writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpupoold.config.file import check_text, lines_of, parsed_file, read_config_file
from gpupoold.config.schema import MAX_FILE_BYTES
from gpupoold.errors import ConfigError

WRONG = """\
# a comment
[server]
prot = 80
host = ""

[[device]]
kind = "emulated"
[[device]]
memory = "1GiB"

[limits]
load_timeout = 0
zzz = '''
several
lines'''
drop_late = "yes"
"""


def told(text: str) -> list[tuple[int | None, str]]:
    return [(one.line, one.key) for one in check_text(text)]


class TestCheck:
    def test_all_problems_with_their_lines(self) -> None:
        assert told(WRONG) == [
            (3, "server.prot"),
            (4, "server.host"),
            (8, "device[1].kind"),
            (12, "limits.load_timeout"),
            (13, "limits.zzz"),
            (16, "limits.drop_late"),
        ]

    def test_says_what_to_write(self) -> None:
        assert check_text(WRONG)[0].in_full == (
            "line 3: server.prot: unknown key (did you mean 'port'?)"
        )

    def test_right_file(self) -> None:
        assert check_text('[log]\nlevel = "debug"\n') == []
        assert check_text("") == []

    @pytest.mark.parametrize(
        ("text", "line"), [("[log]\nlevel = \n", 2), ("x = [\n", 2), ("a = 1\nb = 2 3\n", 2)]
    )
    def test_not_toml(self, text: str, line: int) -> None:
        [problem] = check_text(text)
        assert problem.line == line
        assert "is not valid TOML" in str(problem)

    def test_what_is_wrong_between_sections_is_told_beside_the_rest(self) -> None:
        text = '[scheduling]\nroles = ["mixed", "mixed"]\n[log]\nlevel = 3\n'
        assert told(text) == [(2, "scheduling.roles"), (4, "log.level")]

    def test_short_devices(self) -> None:
        assert told('devices = ["sim:H9"]\n[log]\nlevel = 3\n') == [
            (1, "devices"),
            (3, "log.level"),
        ]
        assert told('\ndevices = ["cuda:1", "cuda:1"]\n') == [(2, "device")]

    def test_wrong_roles_are_one_problem(self) -> None:
        [problem] = check_text('[scheduling]\nroles = ["x"]\n')
        assert 'write "auto", or a list with one role of' in str(problem)


class TestHostile:
    @pytest.mark.parametrize(
        "text", ["a = " + "[" * 50_000, "a = " + "[" * 50_000 + "]" * 50_000, "a" + ".a" * 5_000]
    )
    def test_deep(self, text: str) -> None:
        [problem] = check_text(text)
        assert "is not valid TOML" in str(problem)

    def test_deep_for_later_readers(self) -> None:
        [problem] = check_text("a = " + "[" * 40 + "1" + "]" * 40)
        assert "nested more than 32 levels deep" in str(problem)

    def test_a_named_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match="is a named pipe, not a regular file"):
            read_config_file(tmp_path / "pipe")

    def test_devices_and_folders(self, tmp_path: Path) -> None:
        for path, kind in ((Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
            with pytest.raises(ConfigError, match=f"is {kind}, not a regular file"):
                read_config_file(path)

    def test_a_large_file(self, tmp_path: Path) -> None:
        (tmp_path / "large").write_text("# " + "x" * MAX_FILE_BYTES)
        with pytest.raises(ConfigError, match="larger than the allowed 1 MiB"):
            read_config_file(tmp_path / "large")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("limits.hang_timeout", "1e308"),
            ("limits.hang_timeout", '"1000000000000s"'),
            ("limits.max_live_requests", "10000000000000000000000"),
            ("memory.kv_host", "100000000000000000000000000"),
        ],
    )
    def test_numbers_beyond_all_machines(self, key: str, value: str) -> None:
        section, _, name = key.partition(".")
        [problem] = check_text(f"[{section}]\n{name} = {value}\n")
        assert problem.key == key


class TestLines:
    def test_dotted_and_quoted_keys_and_tables_in_a_row(self) -> None:
        text = 'a.b = 1\n"c d" = {e = 2}\n[f]\n\n g.h=[\n1,\n2]\n[[i]]\n[[i]]\nj = """\n[f]\n"""\n'
        lines = lines_of(text)
        assert lines[("a", "b")] == 1
        assert lines[("c d", "e")] == 2
        assert lines[("f",)] == 3
        assert lines[("f", "g", "h")] == 5
        assert (lines[("i", 0)], lines[("i", 1)], lines[("i", 1, "j")]) == (8, 9, 10)

    def test_too_long_to_be_a_configuration(self) -> None:
        assert lines_of("x = [" + "\n" * 6_000 + "]") == {}


def test_written_keys() -> None:
    text = 'devices = ["sim:2xA10"]\n[log]\nlevel = "info"\n[history]\n'
    assert parsed_file(text, Path("/x")).written == {
        "device[0].kind",
        "device[0].gpu",
        "device[1].kind",
        "device[1].gpu",
        "log.level",
    }
