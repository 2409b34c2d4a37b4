"""``cache``: what is shown of snapshots, and what is done to them."""

from __future__ import annotations

import pytest

from gpupool_cli import output
from gpupoold.api.schemas import BoundEngine, CacheInfo, SnapshotPlace, UnpinnedMemory
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def test_ls(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    daemon.add("b")
    place = SnapshotPlace(num_gpus=1, state="host", num_bytes=1, is_saved=True, nodes=[1])
    daemon.snapshot("a", is_pinned=True, snapshots=[place])
    daemon.snapshot(
        "b",
        state="none",
        is_saved=False,
        num_live=0,
        last_used_at=None,
        unbound_bytes={0: 15 << 30, 2: 1 << 20},
    )
    lines = cli("cache", "ls").stdout.splitlines()
    used_at = output.time_text(samples.AT).split()
    assert [line.split() for line in lines] == [
        "NAME STATE NODE SIZE SAVED PINNED UNBOUND LIVE LAST-USED".split(),
        ["a", "host", "1", "15", "GiB", "yes", "yes", "-", "2", *used_at],
        "b none - 15 GiB - - 15 GiB on device 0, 1 MiB on device 2 0 -".split(),
        [],
        "host memory 15 GiB of 60 GiB".split(),
        "disk 15 GiB of 120 GiB".split(),
    ]
    info = CacheInfo.model_validate_json(cli("cache", "ls", "--json").stdout)
    assert [(model.name, model.is_pinned) for model in info.models] == [("a", True), ("b", False)]


def test_ls_without_saved_snapshots(
    daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = samples.cache([]).model_copy(update={"disk_limit_bytes": 0})
    monkeypatch.setattr(samples, "cache", lambda models: cache)
    assert "no snapshots are saved (memory.snapshot_files)" in cli("cache", "ls").stdout


def test_ls_with_memory_that_no_driver_pins(
    daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned = [
        UnpinnedMemory(device=0, num_bytes=3 << 30, problem="cuMemHostRegister failed"),
        UnpinnedMemory(device=1, num_bytes=5 << 30, problem=""),
    ]
    cache = samples.cache([]).model_copy(update={"unpinned": unpinned})
    monkeypatch.setattr(samples, "cache", lambda models: cache)
    shown = " ".join(cli("cache", "ls").stdout.split())
    assert "3 GiB of host memory are not pinned: cuMemHostRegister failed; copies pass" in shown
    assert "device 1 5 GiB of host memory are not pinned yet; copies pass" in shown


def test_ls_with_engines(daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [
        BoundEngine(device=0, model="a", num_bytes=1 << 30, siblings=["b", "c"]),
        BoundEngine(device=0, model="d", num_bytes=1 << 30, siblings=[], why_unshared="has drafts"),
        BoundEngine(device=1, model="e", num_bytes=1 << 30, siblings=[]),
    ]
    cache = samples.cache([]).model_copy(update={"engines": engines})
    monkeypatch.setattr(samples, "cache", lambda models: cache)
    lines = [line.split() for line in cli("cache", "ls").stdout.splitlines()]
    at = lines.index("DEVICE ENGINE-OF OUTSIDE ALSO-FOR".split())
    assert lines[at + 1 : at + 5] == [
        "0 a 1 GiB b, c".split(),
        "0 d 1 GiB no other: has drafts".split(),
        "1 e 1 GiB -".split(),
        [],
    ]


def test_pin_and_unpin(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a", aliases=("chat",))
    done = cli("cache", "pin", "chat")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "a: pinned\n")
    assert daemon.snapshot("a").is_pinned
    assert cli("cache", "unpin", "chat").stderr == "a: not pinned\n"
    assert not daemon.snapshot("a").is_pinned


def test_pin_of_a_model_that_is_not_in_memory(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    daemon.snapshot("a", state="disk")
    assert "`gpupool cache warm a`" in cli("cache", "pin", "a").stderr


def test_drop_and_warm(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("org/a")
    done = cli("cache", "drop", "org/a")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "org/a: not in host memory\n"
    assert daemon.snapshot("org/a").state == "disk"
    done = cli("cache", "warm", "org/a")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "org/a: loading\norg/a: in host memory, 15 GiB\n"
    assert daemon.snapshot("org/a").state == "host"


def test_drop_while_in_use(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    daemon.live["a"] = 1
    done = cli("cache", "drop", "a")
    assert done.exit_code == 5
    assert done.stderr == "error: a has live requests\nhint: wait until the requests have ended\n"


@pytest.mark.parametrize("verb", ["pin", "unpin", "drop", "warm"])
def test_an_unknown_model(daemon: FakeDaemon, cli: Cli, verb: str) -> None:
    assert cli("cache", verb, "nobody").exit_code == 4
    assert cli("cache", verb).exit_code == 2
