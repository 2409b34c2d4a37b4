"""One thing that the doctor has looked at, and what it thinks of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """``warning``: it works, but worse than it could, or not for long. ``fault``: it does not."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Check:
    """``found`` is what is there; ``fix`` a command or setting that mends it, empty if ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name, Verdict.WARNING, found, fix)


def fault(name: str, found: str, fix: str) -> Check:
    return Check(name, Verdict.FAULT, found, fix)
