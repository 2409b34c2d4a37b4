"""``config`` and ``reload``: shown as a file, all problems at once, what changes and when."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpupoold.api.schemas import ChangeInfo, DiffRequest, EffectName
from gpupoold.config import schema as config
from gpupoold.config.fitting import fitted
from gpupoold.config.schema import parse_settings
from gpupoold.doctor.machine import find_machine
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

WRONG = '[server]\nprot = 1\nport = "x"\n\n[log]\nlevel = "loud"\n'


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the system, none of the developer."""
    monkeypatch.delenv("GPUPOOL_CONFIG", raising=False)
    monkeypatch.setattr(config, "SYSTEM_CONFIG", tmp_path / "none.toml")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG)
    return path


def change(key: str, before: Any, after: Any, effect: EffectName, **more: Any) -> ChangeInfo:
    fields = {"key": key, "before": before, "after": after, "effect": effect, "is_hidden": False}
    return ChangeInfo.model_validate(fields | more)


class TestCheck:
    def test_all_problems_at_once(self, cli: Cli, wrong: Path) -> None:
        told = cli("config", "check", str(wrong))
        assert (told.exit_code, told.stderr) == (1, "")
        lines = told.stdout.splitlines()
        assert lines[:2] == [f"{wrong}:2: server.prot: unknown key", "    did you mean 'port'?"]
        assert lines[2].startswith(f"{wrong}:3: server.port: must be a whole number")
        assert lines[3].startswith(f"{wrong}:6: log.level: must be 'debug'")

    def test_as_json(self, cli: Cli, wrong: Path) -> None:
        told = cli("config", "check", "--json", str(wrong))
        assert told.exit_code == 1
        answer = json.loads(told.stdout)
        assert answer["path"] == str(wrong)
        assert answer["problems"][0] == {
            "key": "server.prot",
            "line": 2,
            "problem": "unknown key",
            "hint": "did you mean 'port'?",
        }

    def test_right_file(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "right.toml"
        path.write_text("[server]\nport = 1\n")
        told = cli("config", "check", str(path))
        assert (told.exit_code, told.stdout) == (0, "")
        assert told.stderr == f"{path}: no errors\n"

    def test_a_sum_that_this_machine_cannot_have(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "greedy.toml"
        path.write_text('[server]\nport = 1\n[memory]\nmodel_cache = "900TiB"\n')
        told = cli("config", "check", str(path))
        assert told.exit_code == 1
        needed = "900 TiB are needed (memory.model_cache 900 TiB, "
        assert f"{path}:4: memory.model_cache: {needed}" in told.stdout
        assert "    lower memory.model_cache" in told.stdout

    def test_the_file_that_is_used(
        self, cli: Cli, wrong: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert cli("config", "check").stderr == "there is no file: the defaults hold\n"
        monkeypatch.setenv("GPUPOOL_CONFIG", str(wrong))
        assert cli("config", "check").exit_code == 1

    def test_no_such_file(self, cli: Cli, tmp_path: Path) -> None:
        told = cli("config", "check", str(tmp_path / "gone"))
        assert told.exit_code == 2
        assert "cannot be read: No such file" in told.stderr


class TestShow:
    def test_is_a_file_that_says_where_values_are_from(self, daemon: FakeDaemon, cli: Cli) -> None:
        told = cli("config", "show")
        assert told.exit_code == 0
        assert "# The settings of gpupoold, from /etc/gpupool/gpupool.toml." in told.stdout
        assert tomllib.loads(told.stdout) == {
            "server": {"host": 'a"b\x7f', "port": 80},
            "device": [{"kind": "sim"}, {"kind": "cuda"}],
            "security": {"allow_pickle": True},
            "paths": {"model_dirs": ["/a", "/b"]},
        }
        lines = {line.partition("  #")[0].strip(): line for line in told.stdout.splitlines()}
        assert lines["port = 80"].endswith("# default")
        assert lines["allow_pickle = true"].endswith("# file")
        assert "# memory is not set" in told.stdout

    def test_json(self, daemon: FakeDaemon, cli: Cli) -> None:
        answer = json.loads(cli("config", "show", "--json").stdout)
        assert answer["settings"][1] == {
            "key": "server.port",
            "value": 80,
            "is_hidden": False,
            "origin": "default",
            "effect": "restart",
            "reason": "",
        }

    def test_defaults_need_no_daemon_and_are_the_defaults(self, cli: Cli) -> None:
        told = cli("config", "show", "--defaults")
        assert told.exit_code == 0
        shown = parse_settings(tomllib.loads(told.stdout), "shown")
        defaults = parse_settings({}, "defaults")
        assert shown == fitted(defaults, find_machine(defaults)).settings
        assert "# default" not in told.stdout
        [line] = [one for one in told.stdout.splitlines() if one.startswith("model_cache = ")]
        assert " of host memory less: " in line or "the control group's limit less: " in line

    def test_without_a_daemon(self, cli: Cli) -> None:
        assert cli("config", "show").exit_code == 3


class TestDiff:
    def test_what_would_change_and_when(self, daemon: FakeDaemon, cli: Cli) -> None:
        daemon.changes = [
            change("log.level", "info", "debug", "live"),
            change("security.allow_pickle", False, True, "loads"),
            change("device[1].kind", None, "sim", "restart"),
        ]
        told = cli("config", "diff")
        assert told.exit_code == 0
        assert [line.split(maxsplit=3) for line in told.stdout.splitlines()] == [
            ["KEY", "NOW", "FILE", "HEEDED"],
            ["log.level", '"info"', '"debug"', "at once"],
            ["security.allow_pickle", "false", "true", "for models loaded from then on"],
            ["device[1].kind", "-", '"sim"', "after a restart of gpupoold"],
        ]
        assert len(json.loads(cli("config", "diff", "--json").stdout)["changes"]) == 3

    def test_another_file_is_sent_as_text(self, daemon: FakeDaemon, cli: Cli, wrong: Path) -> None:
        told = cli("config", "diff", str(wrong))
        assert told.stderr == f"{wrong}: no key would change\n"
        assert daemon.requests == [DiffRequest(text=WRONG, name=str(wrong))]


class TestReload:
    def test_nothing_has_changed(self, daemon: FakeDaemon, cli: Cli) -> None:
        told = cli("reload")
        assert (told.exit_code, told.stdout) == (0, "")
        assert told.stderr == ("/etc/gpupool/gpupool.toml was read again: no key has changed\n")

    def test_what_has_changed_and_what_waits(self, daemon: FakeDaemon, cli: Cli) -> None:
        daemon.changes = [
            change("log.level", "info", "debug", "live"),
            change("server.port", 80, 81, "restart"),
            change("server.host", "a", "b", "restart"),
        ]
        told = cli("reload")
        assert told.stderr == (
            "/etc/gpupool/gpupool.toml was read again: 1 changed, "
            "2 wait for a restart of gpupoold\n"
        )
        assert told.stdout.splitlines()[1].split(maxsplit=3) == [
            "log.level",
            '"info"',
            '"debug"',
            "at once",
        ]
        answer = json.loads(cli("reload", "--json").stdout)
        assert [one["key"] for one in answer["waiting"]] == ["server.port", "server.host"]
