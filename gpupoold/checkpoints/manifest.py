"""The note that a download leaves in its folder: what it fetches, and whether it is done.

An interrupted download goes on with the commit it began with, so that a checkpoint
is never made of two. A finished one is used as it is, with or without a network.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gpupoold.errors import Refused
from gpupoold.system import durable

MANIFEST_FILE = ".gpupool-download.json"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; ``digest`` is its SHA-256 (LFS) or its git blob SHA-1."""

    path: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``revision`` is what was asked for, None for the default branch; ``commit`` what it was."""

    repo_id: str
    revision: str | None
    commit: str
    files: tuple[HubFile, ...]
    complete: bool = False


def read_manifest(folder: Path) -> Manifest | None:
    """The note in ``folder``; None if there is none that can be read."""
    try:
        raw = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = tuple(HubFile(**file) for file in raw.pop("files"))
        return Manifest(**raw, files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the note in ``folder``, never leaving half of one, whatever ends the machine.

    Raises:
        OSError: the folder cannot be written to.
    """
    draft = folder / f"{MANIFEST_FILE}.new"
    draft.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    durable.replace(draft, folder / MANIFEST_FILE)


def require_complete(folder: Path) -> None:
    """Refuse the folder of a download that did not finish.

    Raises:
        Refused: it did not; the hint has the repository.
    """
    manifest = read_manifest(folder)
    if manifest is not None and not manifest.complete:
        raise Refused(
            f"{folder}: the download of {manifest.repo_id} did not finish",
            f"add the model again with --source {manifest.repo_id} to go on with it",
        )
