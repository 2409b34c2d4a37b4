"""Pieces that start together and measure in turn.

Starting engines takes longer than most measurements, and a GPU is rented by the minute. A piece
that has started says so and waits until every other piece has started or ended, and every earlier
piece has ended. Files in a folder say which have: ``NAME.ready`` and ``NAME.done``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "GPUPOOL_BENCH_TURNS"
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Turns:
    """The order in which pieces measure. A piece that is not in ``names`` does not wait."""

    folder: Path
    names: tuple[str, ...]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Turns | None:
        """What ``environment_of`` has told this process, if anything."""
        told = environment.get(VARIABLE)
        if not told:
            return None
        folder, _, names = told.rpartition(":")
        return cls(Path(folder), tuple(names.split(",")))

    def environment_of(self) -> dict[str, str]:
        """Variables for the processes of the pieces."""
        return {VARIABLE: f"{self.folder}:{','.join(self.names)}"}

    @contextlib.contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Wait for this piece's turn, and end the turn after the context."""
        if name not in self.names:
            yield
            return
        self._mark(name, "ready")
        earlier = self.names[: self.names.index(name)]
        while not (self._have_started() and self._have_ended(earlier)):
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self.end(name)

    def end(self, name: str) -> None:
        """Let nobody wait for this piece any longer."""
        self._mark(name, "done")

    def _have_started(self) -> bool:
        return all(self._has(name, "ready") or self._has(name, "done") for name in self.names)

    def _have_ended(self, names: Sequence[str]) -> bool:
        return all(self._has(name, "done") for name in names)

    def _has(self, name: str, what: str) -> bool:
        return (self.folder / f"{name}.{what}").exists()

    def _mark(self, name: str, what: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.{what}").touch()
