"""The result of one check by ``gpupool doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """A check's verdict: with a ``warning`` gpupool works with a drawback, with a ``fault`` not."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Check:
    """A check's result: ``found`` is the state, ``fix`` a command or setting (empty if ok)."""

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
