"""Check the parts of a GPU bundle and unpack the parts into a folder of packages.

Run by ``unpack.sh``; needs only Python's standard library, and no other file of the repository.
"""

from __future__ import annotations

import compileall
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "bundle.json"
_READ_BYTES = 1 << 20


class Unusable(Exception):
    """The parts, or the folder to unpack them to, are not what they should be."""


class Joined(io.RawIOBase):
    """Files one after the other, as one file that is read from its beginning to its end."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self._left = list(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of ``buffer``; 0 at the end of the last file."""
        while True:
            if self._file is None:
                if not self._left:
                    return 0
                self._file = self._left.pop(0).open("rb")
            if count := self._file.readinto(buffer):  # type: ignore[attr-defined]
                return int(count)
            self._file.close()
            self._file = None


def main() -> int:
    """``unpack.py PARTS_DIR SITE_DIR``; exit code 1 with a reason when it cannot be done."""
    if len(sys.argv) != 3:
        print("usage: unpack.sh PARTS_DIR SITE_DIR", file=sys.stderr)
        return 2
    started_s = time.monotonic()
    try:
        manifest = unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    except Unusable as error:
        print(f"unpack: error: {error}", file=sys.stderr)
        return 1
    took_s = time.monotonic() - started_s
    print(f"unpack: {manifest['num_files']} files in {sys.argv[2]} ({took_s:.1f} s)")
    return 0


def unpack(parts: Path, site: Path) -> dict[str, Any]:
    """Check and unpack; returns the manifest. Nothing is done if ``site`` has this bundle.

    ``site`` appears when everything is in it, so that it is whole or not there.

    Raises:
        Unusable: a part is missing or damaged, or ``site`` is something else's folder.
    """
    manifest = _read_manifest(parts / MANIFEST)
    if _holds(site, manifest):
        return manifest
    paths = check_parts(parts, manifest)
    staging = site.with_name(site.name + ".unpacking")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        with tarfile.open(
            fileobj=io.BufferedReader(Joined(paths), _READ_BYTES), mode="r|xz"
        ) as tar:
            _extract(tar, staging)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Unusable(f"cannot unpack to {staging}: {error}") from error
    # Compile all modules now; otherwise the first processes would all compile their imports.
    # Errors are ignored, because some files are templates and not valid Python.
    compileall.compile_dir(staging, quiet=2, workers=0)
    shutil.copy(parts / MANIFEST, staging / MANIFEST)
    shutil.rmtree(site, ignore_errors=True)
    os.replace(staging, site)
    return manifest


def check_parts(parts: Path, manifest: dict[str, Any]) -> list[Path]:
    """The parts in order.

    Raises:
        Unusable: one is missing, too short or too long, or its sum is not the manifest's.
    """
    whole = hashlib.sha256()
    paths = []
    for part in manifest["parts"]:
        path = parts / part["name"]
        if not path.is_file():
            raise Unusable(f"{path} is missing: all {len(manifest['parts'])} parts have to be here")
        found, wanted = path.stat().st_size, part["num_bytes"]
        if found != wanted:
            raise Unusable(f"{path} has {found} bytes, not {wanted}: carry it here again")
        if _sum(path, whole) != part["sha256"]:
            raise Unusable(f"{path} is damaged, its SHA-256 is another: carry it here again")
        paths.append(path)
    if whole.hexdigest() != manifest["sha256"]:
        raise Unusable(f"{parts / MANIFEST} contradicts itself: make the bundle anew")
    return paths


def _sum(path: Path, whole: Any) -> str:
    own = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            own.update(piece)
            whole.update(piece)
    return own.hexdigest()


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
    else:  # before Python 3.11.4; safe, because the archive's checksum was checked
        tar.extractall(folder)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unusable(f"{path} cannot be read: {error}") from error
    return manifest


def _holds(site: Path, manifest: dict[str, Any]) -> bool:
    """Return whether a bundle was unpacked there before, and it is this one."""
    if not site.exists() or not any(site.iterdir()):
        return False
    if not (site / MANIFEST).is_file():
        raise Unusable(f"{site} is not empty and holds no bundle: name another folder")
    return bool(_read_manifest(site / MANIFEST)["sha256"] == manifest["sha256"])


if __name__ == "__main__":
    sys.exit(main())
