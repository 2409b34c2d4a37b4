"""The manifest of a download, a file in the target folder: goal and state.

An interrupted download continues with its first commit, so no checkpoint mixes two commits. A
finished download is used unchanged, with or without a network.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gpupoold.checkpoints.files import read_json
from gpupoold.errors import Refused
from gpupoold.system import durable

MANIFEST_FILE = ".gpupool-download.json"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; ``digest`` is the SHA-256 (LFS) or the git blob SHA-1."""

    path: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A download's goal and state.

    ``revision`` is as requested, None for the default branch; ``commit`` is the revision's commit.
    """

    repo_id: str
    revision: str | None
    commit: str
    files: tuple[HubFile, ...]
    complete: bool = False


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in ``folder``; None without a readable manifest."""
    try:
        raw = read_json(folder / MANIFEST_FILE)
        files = tuple(HubFile(**file) for file in raw.pop("files"))
        return Manifest(**raw, files=files)
    except (Refused, TypeError, KeyError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in ``folder`` atomically, even across a power failure.

    Raises:
        OSError: the folder cannot be written to.
    """
    draft = folder / f"{MANIFEST_FILE}.new"
    draft.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    durable.replace(draft, folder / MANIFEST_FILE)


def require_complete(folder: Path) -> None:
    """Check that ``folder`` has no unfinished download.

    Raises:
        Refused: the download is unfinished; the hint has the repository.
    """
    manifest = read_manifest(folder)
    if manifest is not None and not manifest.complete:
        raise Refused(
            f"{folder}: the download of {manifest.repo_id} did not finish",
            f"add the model again with --source {manifest.repo_id} to continue the download",
        )
