"""Where records are shown besides the log file."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.config.schema import parse_settings
from gpupoold.errors import Failed
from gpupoold.logs.files import MAX_RECORDS, MAX_TEXT_CHARS
from gpupoold.logs.setup import JournalHandler, shown_handler, start_logging


def test_the_journal_gets_fields_and_a_terminal_text(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        plain = shown_handler(stream, {})
        assert type(plain) is logging.StreamHandler
        status = (tmp_path / "stderr").stat()
        variables = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        journal = shown_handler(stream, variables)
        assert isinstance(journal, JournalHandler)
        record = logging.makeLogRecord({"name": "n", "msg": "said"})
        assert journal.format(record) == "said"
        journal.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    paths = {"log_dir": str(tmp_path / "nowhere")}
    with pytest.raises(Failed, match="nowhere: cannot be written"):
        start_logging(parse_settings({"paths": paths}, "test"))


def test_the_daemons_log_is_bounded_in_size_and_rate(tmp_path: Path) -> None:
    script = f"""
import logging
from gpupoold.config.schema import parse_settings
from gpupoold.logs.setup import start_logging
start_logging(parse_settings({{"paths": {{"log_dir": {str(tmp_path)!r}}}}}, "test"))
for number in range(1000):
    logging.getLogger("gpupoold").warning("warning %d", number)
for number in range(60):
    # Each from a place of its own.
    exec("\\n" * number + "logging.getLogger('gpupoold').warning('x' * 2_000_000)")
"""
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    logged = (tmp_path / "gpupoold.log").read_text()
    assert shown.stderr == logged
    assert logged.count(": warning ") == MAX_RECORDS
    assert len(logged) < 60 * 2 * MAX_TEXT_CHARS
