"""Comparison of the seams of two releases."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.vllm_seams.records import Record, key
from scripts.vllm_seams.release import ABSENT, Description, Release
from scripts.vllm_seams.seam import Seam

_MAX_CHANGES = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One seam of the compared release."""

    seam: Seam
    kind: str
    status: str
    """``as before``, ``changed``, ``missing``, ``new``, or ``unknown`` without a record."""
    change: str
    is_reviewed: bool
    """True if a change is in the release's record, which is written after a review."""

    @property
    def is_open(self) -> bool:
        """True if somebody has to look at the seam."""
        return self.status != "as before" and not self.is_reviewed


def compare(
    seams: Iterable[Seam], base: Record, release: Release, reviewed: Record | None
) -> list[Row]:
    """Return a row per seam: ``release`` against ``base``, and the review of an earlier call."""
    rows = []
    for seam in seams:
        found = release.describe(seam.name, seam.compared)
        before = base.get(key(seam))
        is_reviewed = reviewed is not None and reviewed.get(key(seam)) == found
        status = _status(before, found)
        change = _change(before, found) if status == "changed" and before is not None else ""
        kind = found.kind if found != ABSENT or before is None else before.kind
        rows.append(Row(seam, kind, status, change, is_reviewed))
    return rows


def _status(before: Description | None, found: Description) -> str:
    if before is None:
        return "unknown"
    if before == found:
        return "as before"
    if found == ABSENT:
        return "missing"
    return "new" if before == ABSENT else "changed"


def _change(before: Description, found: Description) -> str:
    if before.kind != found.kind:
        return f"{before.kind}, now {found.kind}"
    if len(before.text) == len(found.text) == 16 and " " not in before.text:
        return "other code"
    if before.text.startswith(("(", "@", "async ")):
        return f"{before.text}, now {found.text}"
    old, new = before.text.split("; "), found.text.split("; ")
    changes = [f"-{one}" for one in old if one not in new]
    changes += [f"+{one}" for one in new if one not in old]
    more = f" and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
    return ", ".join(changes[:_MAX_CHANGES]) + more


def source_diff(name: str, old: Release, new: Release) -> str:
    """Return the changes of a seam's code without comments, as a unified diff."""
    return "\n".join(
        difflib.unified_diff(
            old.source(name).splitlines(), new.source(name).splitlines(), lineterm="", n=3
        )
    )
