"""Progress of a long operation on stderr: a bar on a terminal, else one line per stage."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress as RichProgress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
)

from gpupool_cli.diagnostics import say
from gpupoold.api.schemas import Progress
from gpupoold.units import format_bytes

_WORDS = {
    "resolve": "finding the checkpoint",
    "download": "downloading",
    "check": "checking",
    "load": "loading",
    "spread": "serving; loading on further devices",
    "ready": "ready",
}


class BarView:
    """A context manager with a bar on stderr, on a terminal."""

    def __init__(self, *columns: ProgressColumn, wanted: bool = True) -> None:
        """``columns`` are rich's; no bar is shown unless ``wanted``."""
        self._bar: RichProgress | None = None
        if wanted and sys.stderr.isatty():
            self._bar = RichProgress(
                *columns,
                console=Console(file=sys.stderr),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class ProgressView(BarView):
    """The ``Progress`` lines of one operation; use as a context manager."""

    def __init__(self, name: str) -> None:
        super().__init__(
            SpinnerColumn(), description_column(), BarColumn(), DownloadColumn(binary_units=True)
        )
        self._name = name
        self._stage = ""
        self._task: TaskID | None = None

    def show(self, progress: Progress) -> None:
        """Take in the next line of the stream."""
        started = progress.stage != self._stage
        self._stage = progress.stage
        if self._bar is not None:
            self._show_bar(self._bar, progress, started)
        elif started and progress.model is None:
            total = f" {format_bytes(progress.total_bytes)}" if progress.total_bytes else ""
            say(f"{self._name}: {_words(progress.stage)}{total}")

    def _show_bar(self, bar: RichProgress, progress: Progress, started: bool) -> None:
        if started and self._task is not None:
            bar.remove_task(self._task)
            self._task = None
        if self._task is None:
            self._task = bar.add_task(f"{self._name}: {_words(progress.stage)}", total=None)
        bar.update(self._task, completed=progress.done_bytes, total=progress.total_bytes)


def description_column() -> TextColumn:
    """Return the description of a bar without interpretation of brackets as markup."""
    return TextColumn("{task.description}", markup=False)


def _words(stage: str) -> str:
    return _WORDS.get(stage, stage)
