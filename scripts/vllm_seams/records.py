"""What the seams of a release are, as files beside this module: one per release that was read."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.vllm_seams.found import seams_in_source
from scripts.vllm_seams.release import Description, Release
from scripts.vllm_seams.seam import Seam, merged
from scripts.vllm_seams.table import seams_in_table

_FOLDER = Path(__file__).parent / "releases"

Record = dict[str, Description]
"""Descriptions by the seam's key."""


def all_seams(release: Release) -> list[Seam]:
    """Return every seam once; overridden methods are those that ``release`` has."""
    return merged([*seams_in_source(release), *seams_in_table()])


def key(seam: Seam) -> str:
    return seam.name if seam.compared == "auto" else f"{seam.name} ({seam.compared})"


def describe(seams: list[Seam], release: Release) -> Record:
    return {key(seam): release.describe(seam.name, seam.compared) for seam in seams}


def recorded_versions() -> list[str]:
    """Return the releases with a file, oldest first."""
    return sorted((path.stem for path in _FOLDER.glob("*.json")), key=order)


def order(version: str) -> list[int]:
    """Return a key that sorts versions by age."""
    return [int(part) for part in version.split(".")]


def load(version: str) -> Record:
    """Return the record of a release.

    Raises:
        FileNotFoundError: the release was not recorded.
    """
    found = json.loads((_FOLDER / f"{version}.json").read_text("utf-8"))
    return {name: Description(kind, text) for name, (kind, text) in found.items()}


def save(version: str, record: Record) -> Path:
    """Write the record of a release, one line per seam."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps([one.kind, one.text])}"
        for name, one in sorted(record.items())
    ]
    path = _FOLDER / f"{version}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path
