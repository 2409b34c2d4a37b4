"""What systemd hands over and is told, over real sockets."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.system.systemd import (
    Environment,
    FdStore,
    Inherited,
    NamedFd,
    Notifier,
    informed,
    read_environment,
    take_environment,
)
from tests.service_manager import FakeManager

GIVEN = {"LISTEN_PID": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:admin"}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    with FakeManager(tmp_path) as running:
        yield running


def test_descriptors_have_names() -> None:
    found = read_environment(GIVEN | {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "30000000"}, 7)
    assert found == Environment((NamedFd(3, "http"), NamedFd(4, "admin")), "/run/n", 30.0)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, []),
        (GIVEN | {"LISTEN_PID": "8"}, []),
        (GIVEN | {"LISTEN_FDS": "two"}, []),
        (GIVEN | {"LISTEN_FDS": "-1"}, []),
        (GIVEN | {"LISTEN_FDS": "1"}, ["http"]),
        (GIVEN | {"LISTEN_FDS": "3"}, ["http", "admin", "unknown"]),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "1"}, [""]),
    ],
    ids=["none", "for another process", "no number", "negative", "fewer", "more", "no names"],
)
def test_what_counts_as_migrated(variables: dict[str, str], names: list[str]) -> None:
    assert [one.name for one in read_environment(variables, 7).fds] == names


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
    ids=["ours", "named", "for another process", "off", "no number"],
)
def test_who_is_watched(variables: dict[str, str], expected: float | None) -> None:
    assert read_environment(variables, 7).watchdog_s == expected


def test_children_get_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = os.pipe()
    monkeypatch.setattr("gpupoold.system.systemd._FIRST_FD", descriptors[0])
    os.set_inheritable(descriptors[0], True)
    variables = {"LISTEN_PID": "7", "LISTEN_FDS": "1", "NOTIFY_SOCKET": "/run/n", "HOME": "/h"}
    found = take_environment(variables, 7)
    assert variables == {"HOME": "/h"}
    assert (found.notify_address, len(found.fds)) == ("/run/n", 1)
    assert fcntl.fcntl(descriptors[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for fd in descriptors:
        os.close(fd)


def test_sockets_and_others_are_taken_by_name(caplog: pytest.LogCaptureFixture) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    kept = os.memfd_create("kept")
    stranger = os.memfd_create("stranger")
    named = [
        NamedFd(listener.detach(), "http"),
        NamedFd(kept, "snapshot-1"),
        NamedFd(stranger, "what"),
    ]
    with Inherited(named) as inherited:
        taken = inherited.socket("http")
        assert taken is not None
        with taken:
            assert taken.getsockname() == address
        assert inherited.socket("http") is None
        assert inherited.socket("admin") is None
        assert inherited.named("snapshot-") == [NamedFd(kept, "snapshot-1")]
        assert inherited.named("snapshot-") == []
        inherited.close()
    assert "a descriptor with the unknown name 'what'" in caplog.text
    os.close(kept)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(stranger)


def test_a_start_that_fails_does_not_call_its_descriptors_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin = os.memfd_create("admin")
    with pytest.raises(RuntimeError), Inherited([NamedFd(admin, "admin")]):
        raise RuntimeError
    assert not caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(admin)


def test_what_is_sent(manager: FakeManager) -> None:
    notifier = Notifier(manager.address)
    notifier.ready()
    notifier.status("two models")
    notifier.status("two models")
    notifier.is_well()
    with pytest.raises(ValueError, match="wrong"), notifier.reloading():
        raise ValueError("wrong")
    notifier.stopping(1.5)
    manager.wait_for("STOPPING")
    assert [next(iter(message)) for message in manager.messages] == [
        "READY", "STATUS", "WATCHDOG", "RELOADING", "READY", "STOPPING"
    ]  # fmt: skip
    assert manager.values("STATUS") == ["two models"]
    assert manager.values("EXTEND_TIMEOUT_USEC") == ["1500000"]


def test_nothing_is_sent_without_an_address() -> None:
    notifier = Notifier()
    assert not notifier.has_listener
    assert not notifier.send("READY=1")


def test_a_manager_that_is_not_there_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nowhere"
    notifier = Notifier(str(path))
    for _ in range(3):
        assert not notifier.send("READY=1")
    assert caplog.text.count("READY=1 could not be sent to systemd") == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        assert notifier.send("READY=1")
    assert not notifier.send("READY=1")
    assert caplog.text.count("READY=1 could not be sent to systemd") == 2


def test_abstract_addresses() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0gpupool-test-{os.getpid()}")
        assert Notifier(f"@gpupool-test-{os.getpid()}").send("READY=1")
        assert listener.recv(100) == b"READY=1"


def test_descriptors_are_kept_and_dropped(manager: FakeManager) -> None:
    store = FdStore(Notifier(manager.address))
    fd = os.memfd_create("kept")
    os.write(fd, b"bytes")
    assert store.is_there
    assert store.keep("snapshot-1", [fd])
    os.close(fd)
    manager.wait_for("FDSTORE")
    [kept] = manager.stored["snapshot-1"]
    assert os.pread(kept, 5, 0) == b"bytes"
    store.drop("snapshot-1")
    manager.wait_for("FDSTOREREMOVE")
    assert manager.stored == {}


async def until_sent(manager: FakeManager, field: str, num: int = 1) -> None:
    await asyncio.to_thread(manager.wait_for, field, num)


async def test_a_daemon_that_is_well_says_so_again_and_again(manager: FakeManager) -> None:
    notifier = Notifier(manager.address)
    async with informed(notifier, 0.03, lambda: "two models", lambda _: ""):
        await until_sent(manager, "WATCHDOG", 3)
    assert manager.values("STATUS") == ["two models"]


async def test_one_that_is_not_well_says_why_until_it_is(
    manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    problem = "nobody looks after the workers"
    notifier = Notifier(manager.address)
    async with informed(notifier, 0.03, lambda: "fine", lambda _: problem):
        await until_sent(manager, "STATUS")
        assert manager.values("STATUS") == [f"stuck: {problem}"]
        assert manager.values("WATCHDOG") == []
        problem = ""
        await until_sent(manager, "WATCHDOG")
    assert caplog.text.count("no watchdog ping is sent: nobody") == 1


async def test_without_a_watchdog_there_is_the_status(manager: FakeManager) -> None:
    async with informed(Notifier(manager.address), None, lambda: "fine", lambda _: ""):
        await until_sent(manager, "STATUS")
    assert manager.values("WATCHDOG") == []


async def test_without_a_manager_nobody_is_asked() -> None:
    def ask(*_: float) -> str:
        raise AssertionError("asked")

    async with informed(Notifier(), 0.03, ask, ask):
        await asyncio.sleep(0)
