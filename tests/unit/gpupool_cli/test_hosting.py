"""``host`` and ``add-model --devices``: the devices of a model's engines, by hand."""

from __future__ import annotations

import pytest

from gpupoold.api.schemas import EngineInfo
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


@pytest.fixture(autouse=True)
def model(daemon: FakeDaemon) -> None:
    info = samples.model("a")
    daemon.add("a", usage=samples.usage(info, measured=True))


def test_by_hand_and_back(daemon: FakeDaemon, cli: Cli) -> None:
    usage = daemon.find("a").usage
    done = cli("host", "a", "0", "1")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "a: on no device; by hand: 0, 1\n")
    assert daemon.find("a").devices == (0, 1)
    daemon.add("a", usage=usage, devices=(0,))
    assert "engines" in cli("show", "a").stdout
    assert "device 0 (1 GiB); by hand: 0" in cli("show", "a").stdout
    assert "14.2s: build 2.1, read 6.0, snapshot 6.1" in cli("show", "a").stdout
    assert cli("host", "a", "--auto").stderr == "a: on no device; chosen by the scheduler\n"
    assert daemon.find("a").devices == ()


def test_an_engine_to_take_over(daemon: FakeDaemon, cli: Cli) -> None:
    info = samples.model("a")
    update = {"engines": [], "slots": [0, 1], "unbound_bytes": {0: 3 << 20, 1: 5 << 20}}
    usage = samples.usage(info, measured=True).model_copy(update=update)
    daemon.add("a", usage=usage)
    shown = cli("show", "a").stdout
    assert "none; takes over one of a fine-tune on device 0, 1;" in shown
    assert "3 MiB on device 0, 5 MiB on device 1" in shown


def test_an_engine_for_no_other_model(daemon: FakeDaemon, cli: Cli) -> None:
    usage = samples.usage(samples.model("a"), measured=True)
    alone = EngineInfo(device=0, device_bytes=1 << 30, host_bytes=0, why_unshared="has drafts")
    daemon.add("a", usage=usage.model_copy(update={"engines": [alone]}))
    assert "not for fine-tunes: has drafts" in cli("show", "a").stdout


@pytest.mark.parametrize("arguments", [("a",), ("a", "0", "--auto"), ("a", "x"), ("a", "2")])
def test_what_cannot_be_understood_changes_nothing(
    daemon: FakeDaemon, cli: Cli, arguments: tuple[str, ...]
) -> None:
    daemon.add("a", devices=(1,))
    assert cli("host", *arguments).exit_code == 2
    assert daemon.find("a").devices == (1,)


def test_a_model_that_there_is_not(cli: Cli) -> None:
    assert cli("host", "b", "0").exit_code == 4


def test_an_addition_with_devices(daemon: FakeDaemon, cli: Cli) -> None:
    cli("add-model", "b", "--devices", "0,1")
    assert daemon.requests[-1].model_dump()["devices"] == [0, 1]
    assert cli("add-model", "c", "--devices", "first").exit_code == 2
