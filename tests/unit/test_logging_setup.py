"""Where records are shown besides the log file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gpupoold.config import parse_settings
from gpupoold.errors import Failed
from gpupoold.journal import JournalHandler
from gpupoold.logging_setup import shown_handler, start_logging


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
