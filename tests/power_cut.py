"""What a power cut leaves of a folder: what a process has synced, and nothing else.

The content of a file is what it was when the file was last synced, else nothing. Its name is
there if its folder was synced since it has that name. Real file systems keep more than that,
sometimes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("power_cut.c")


class PowerCut:
    """Watches what the processes with its ``environment`` sync in the folder ``root``."""

    def __init__(self, root: Path, workspace: Path) -> None:
        """Compile what is preloaded into those processes; without a compiler, skip the test."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        library = workspace / "power_cut.so"
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
        command = [compiler, *options, "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self._root = root.resolve()
        self._disk = workspace / "disk"
        self._disk.mkdir()
        self.environment = os.environ | {
            "LD_PRELOAD": str(library),
            "POWER_CUT_ROOT": str(self._root),
            "POWER_CUT_DISK": str(self._disk),
        }

    @property
    def num_syncs(self) -> int:
        """Successful calls of fsync and fdatasync so far."""
        syncs = self._disk / "syncs"
        return syncs.stat().st_size if syncs.exists() else 0

    def leave(self, target: Path) -> Path:
        """Make ``target`` what is left of the folder, and return it."""
        names = {}
        for listing in self._disk.glob("folder-*"):
            folder, *entries = listing.read_text().splitlines()
            names[Path(folder)] = [entry.split(" ", 1) for entry in entries]
        self._fill(self._root, target, names)
        return target

    def _fill(self, folder: Path, target: Path, names: dict[Path, list[list[str]]]) -> None:
        target.mkdir()
        for inode, name in names.get(folder, []):
            kept = self._disk / f"file-{inode}"
            if folder / name in names:
                self._fill(folder / name, target / name, names)
            elif kept.exists():
                shutil.copy(kept, target / name)
            else:
                (target / name).touch()
