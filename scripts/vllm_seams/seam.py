"""A seam: one name of vLLM that gpupool uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Compared = Literal["auto", "presence", "signature", "fields", "source"]
"""What of a name is compared between two releases.

``auto``: the signature of a function, the fields of a record or of an enumeration, the signature of
another class's constructor, the presence of a variable. ``source``: the code without comments and
docstrings, where gpupool relies on the behaviour.
"""


@dataclass(frozen=True, slots=True, order=True)
class Seam:
    """A dotted name, or ``envs.NAME`` for an environment variable that vLLM reads."""

    name: str
    compared: Compared
    users: tuple[str, ...]
    """Files of gpupool, relative to the repository."""


def merged(seams: list[Seam]) -> list[Seam]:
    """Return one seam per name and comparison, sorted, with all users.

    A name whose source is compared needs no other comparison.
    """
    users: dict[tuple[str, Compared], set[str]] = {}
    for seam in seams:
        users.setdefault((seam.name, seam.compared), set()).update(seam.users)
    by_source = {name for name, compared in users if compared == "source"}
    found: dict[tuple[str, Compared], set[str]] = {}
    for (name, compared), files in users.items():
        key: tuple[str, Compared] = (name, "source" if name in by_source else compared)
        found.setdefault(key, set()).update(files)
    return sorted(
        Seam(name, compared, tuple(sorted(files))) for (name, compared), files in found.items()
    )
