"""Manual pages: one for each command, with all that its help says, and sound roff."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpupoold import __version__
from scripts.man_pages import pages
from tests.unit.test_docs import COMMANDS, options_of

PAGES = dict(pages())


def plain(roff: str) -> str:
    return roff.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "").replace("\\&", "")


def test_every_command_has_a_page() -> None:
    shown = {"-".join(("gpupool", *path)) for path, one in COMMANDS.items() if not one.hidden}
    assert {f"{name}.1" for name in shown} <= set(PAGES)
    assert {"gpupool.1", "gpupool-cache.1", "gpupoold.8"} <= set(PAGES)
    assert "gpupool-ls.1" not in PAGES  # hidden


@pytest.mark.parametrize("path", [path for path, one in COMMANDS.items() if not one.hidden])
def test_a_page_has_every_option(path: tuple[str, ...]) -> None:
    page = plain(PAGES[f"gpupool-{'-'.join(path)}.1"])
    for option in options_of(COMMANDS[path]):
        assert option in page


def test_a_group_names_its_commands() -> None:
    page = plain(PAGES["gpupool-cache.1"])
    assert ".B gpupool-cache-pin(1)\n" in page
    assert "gpupool-add-model(1)" in plain(PAGES["gpupool.1"])


def test_the_daemons_page() -> None:
    page = plain(PAGES["gpupoold.8"])
    for text in ("--check-config", "--config CONFIG", "EXIT STATUS", "/etc/gpupool/gpupool.toml"):
        assert text in page
    assert f'"gpupool {__version__}"' in page


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_has_no_warnings(tmp_path: Path) -> None:
    # One run, because a run for each page takes seconds.
    sources = "".join(PAGES.values())
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-rLL=78n", "-z"],
        input=sources,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    faults = [
        line for line in done.stderr.splitlines() if not re.search("can't break|adjust", line)
    ]
    assert (done.returncode, faults) == (0, [])
