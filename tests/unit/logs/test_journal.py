"""Records in the journal's own format, read from a real socket."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.logs.setup import JournalHandler, encode, is_journal
from tests.unit.descriptors import open_descriptors, opened_since


class Journal:
    """A socket such as journald's; reads what a handler sends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(10)

    def read(self) -> dict[str, str]:
        data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 1)
        for fd in fds:
            with open(fd, "rb") as file:
                file.seek(0)
                data = file.read()
        return decode(data)

    def close(self) -> None:
        self._socket.close()


def decode(data: bytes) -> dict[str, str]:
    fields = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, is_short, value = line.partition(b"=")
        if not is_short:
            (num_bytes,) = struct.unpack("<Q", data[:8])
            value, data = data[8 : 8 + num_bytes], data[8 + num_bytes + 1 :]
        fields[name.decode()] = value.decode()
    return fields


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal")
    yield made
    made.close()


@pytest.fixture
def logger(journal: Journal) -> Iterator[logging.Logger]:
    made = logging.getLogger("gpupool-test-journal")
    made.propagate = False
    made.setLevel(logging.DEBUG)
    handler = JournalHandler(journal.path)
    made.addHandler(handler)
    yield made
    made.removeHandler(handler)
    handler.close()


def test_fields_of_a_record(logger: logging.Logger, journal: Journal) -> None:
    logger.warning("%s of %s", "one", "two")
    fields = journal.read()
    assert fields.pop("CODE_LINE").isdigit()
    assert fields == {
        "MESSAGE": "one of two",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "gpupoold",
        "LOGGER": "gpupool-test-journal",
        "CODE_FILE": __file__,
        "CODE_FUNC": "test_fields_of_a_record",
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.DEBUG, "7"),
        (logging.INFO, "6"),
        (logging.WARNING, "4"),
        (logging.ERROR, "3"),
        (logging.CRITICAL, "2"),
    ],
)
def test_priorities(logger: logging.Logger, journal: Journal, level: int, priority: str) -> None:
    logger.log(level, "said")
    assert journal.read()["PRIORITY"] == priority


@pytest.mark.parametrize(
    ("kind", "subject", "field"),
    [
        ("model_failed", "qwen", "GPUPOOL_MODEL"),
        ("refused", "qwen", "GPUPOOL_MODEL"),
        ("request_cancelled", "qwen", "GPUPOOL_MODEL"),
        ("requests_suspected", "qwen", "GPUPOOL_MODEL"),
        ("key_added", "web", "GPUPOOL_SUBJECT"),
        ("of an older release", "x", "GPUPOOL_SUBJECT"),
        ("worker_down", "0", "GPUPOOL_DEVICE"),
        ("drain_began", "0", "GPUPOOL_DEVICE"),
        ("daemon_started", "gpupoold", "GPUPOOL_SUBJECT"),
    ],
)
def test_fields_of_an_event(
    logger: logging.Logger, journal: Journal, kind: str, subject: str, field: str
) -> None:
    logger.info("said", extra={"event_kind": kind, "event_subject": subject})
    fields = journal.read()
    found = {name: value for name, value in fields.items() if name.startswith("GPUPOOL_")}
    assert found == {"GPUPOOL_EVENT": kind, field: subject}


def test_several_lines_and_a_traceback(logger: logging.Logger, journal: Journal) -> None:
    try:
        raise ValueError("on purpose")
    except ValueError:
        logger.exception("it\nfailed")
    message = journal.read()["MESSAGE"]
    assert message.startswith("it\nfailed\nTraceback")
    assert message.endswith("ValueError: on purpose")


def test_what_is_too_large_for_a_datagram(logger: logging.Logger, journal: Journal) -> None:
    before = open_descriptors()
    text = "x" * (8 << 20)
    logger.info("%s", text)
    assert journal.read()["MESSAGE"] == text
    assert not opened_since(before)


def test_without_a_journal_records_are_on_standard_error(
    logger: logging.Logger, journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.path.unlink()
    logger.info("said")
    assert capsys.readouterr().err == "said\n"


def test_encoding() -> None:
    assert encode({"A": "b", "C": "d\ne"}) == b"A=b\nC\n\3\0\0\0\0\0\0\0d\ne\n"


def test_which_descriptor_is_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    status = path.stat()
    with path.open() as file:
        fd = file.fileno()
        assert is_journal(fd, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        assert not is_journal(fd, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + 1}"})
        assert not is_journal(fd, {})
    assert not is_journal(fd, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
