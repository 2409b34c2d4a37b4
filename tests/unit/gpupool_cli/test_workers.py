"""``role``, ``drain`` and ``undrain``: what is done to a device, and what ``ps`` shows of it."""

from __future__ import annotations

import pytest

from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_role_by_hand(daemon: FakeDaemon, cli: Cli, role: str) -> None:
    done = cli("role", "set", "0", role)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"device 0: {role}\n")
    assert daemon.device == {"role": role, "is_role_fixed": True}


def test_a_role_that_is_the_policys_to_choose(daemon: FakeDaemon, cli: Cli) -> None:
    cli("role", "set", "0", "prefill")
    assert cli("role", "set", "0", "auto").stderr == "device 0: prefill (auto)\n"
    assert not daemon.device["is_role_fixed"]


def test_drain_and_undrain(daemon: FakeDaemon, cli: Cli) -> None:
    done = cli("drain", "0")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "device 0: has no requests and gets none until `gpupool undrain 0`\n"
    assert daemon.device["is_draining"]
    assert cli("undrain", "0").stderr == "device 0: has work again\n"
    assert not daemon.device["is_draining"]


def test_ps_shows_who_chose_the_role_and_who_is_being_emptied(daemon: FakeDaemon, cli: Cli) -> None:
    assert "mixed (auto)" in cli("ps").stdout
    daemon.device = {"role": "decode", "is_role_fixed": True, "is_draining": True}
    assert "decode, draining" in cli("ps").stdout


def test_a_drain_that_is_not_waited_for_any_longer(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.live["a"] = 3
    done = cli("drain", "0")
    assert done.exit_code != 0
    assert (
        done.stderr == "error: worker 0 still has 3 requests\nhint: the requests continue there\n"
    )
    assert daemon.device["is_draining"]


@pytest.mark.parametrize(
    "arguments",
    [("role", "set", "7", "mixed"), ("drain", "7"), ("undrain", "7")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.usefixtures("daemon")
def test_a_device_that_there_is_not(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.exit_code == 2
    assert "there is no device 7" in done.stderr
    assert "the only device is 0" in done.stderr
    wrong = ("role", "set", "0", "writer") if "role" in arguments else (arguments[0], "one")
    done = cli(*wrong)
    assert done.exit_code == 2
    assert "Input should" not in done.stderr
    assert "Value error" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("role", "set", "0", "nothing"),
        ("role", "set", "0"),
        ("role", "set", "-1", "mixed"),
        ("drain",),
        ("drain", "first"),
        ("undrain", "-1"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_understood_changes_nothing(
    daemon: FakeDaemon, cli: Cli, arguments: tuple[str, ...]
) -> None:
    assert cli(*arguments).exit_code == 2
    assert daemon.device == {}
