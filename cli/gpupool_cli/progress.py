"""Progress of a long operation on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
from gpupoold.api.schemas_models import STAGE_WORDS, Progress, amount_text, speed_text, stage_text
from gpupoold.units import without_controls

_LINE_INTERVAL_S = 5.0
_BAR_WIDTH = 20


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


class WaitView(BarView):
    """A line about a wait on stderr, until the wait ends; use as a context manager.

    Nothing is shown without a terminal.
    """

    def __init__(self) -> None:
        super().__init__(SpinnerColumn(), description_column())
        self._task: TaskID | None = None

    def show(self, text: str) -> None:
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(text, total=None)
        self._bar.update(self._task, description=text)

    def end(self) -> None:
        """Remove the line; further calls do nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressView(BarView):
    """The ``Progress`` lines of one operation; use as a context manager.

    Without a terminal each stage is a line, and a download has a line every few seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        super().__init__(
            SpinnerColumn(),
            description_column(),
            BarColumn(_BAR_WIDTH),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[speed]}", markup=False),
        )
        self._name = name
        self._clock = clock
        self._stage = ""
        self._next_line_at = 0.0
        self._task: TaskID | None = None
        self.has_downloaded = False

    def show(self, progress: Progress) -> None:
        started = progress.stage != self._stage
        self._stage = progress.stage
        self.has_downloaded = self.has_downloaded or progress.stage == "download"
        if progress.note:
            self.tell(progress.note)
        elif self._bar is not None:
            self._show_bar(self._bar, progress, started)
        elif progress.model is None:
            self._show_line(progress, started)

    def tell(self, remark: str) -> None:
        """Print a remark about the operation, above the bar."""
        text = f"{self._name}: {remark}"
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(without_controls(text), markup=False, highlight=False)

    def _show_line(self, progress: Progress, started: bool) -> None:
        now, amount = self._clock(), amount_text(progress)
        if started:
            say(f"{self._name}: {stage_text(progress)}")
        elif amount and now >= self._next_line_at:
            say(f"{self._name}: {amount}")
        else:
            return
        self._next_line_at = now + _LINE_INTERVAL_S

    def _show_bar(self, bar: RichProgress, progress: Progress, started: bool) -> None:
        if started and self._task is not None:
            bar.remove_task(self._task)
            self._task = None
        if self._task is None:
            words = STAGE_WORDS.get(progress.stage, progress.stage)
            self._task = bar.add_task(f"{self._name}: {words}", total=None, speed="")
        bar.update(
            self._task,
            completed=progress.done_bytes,
            total=progress.total_bytes,
            speed=speed_text(progress),
        )


def description_column() -> TextColumn:
    """Return the description of a bar without interpretation of brackets as markup."""
    return TextColumn("{task.description}", markup=False)
