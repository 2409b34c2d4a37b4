"""The screen: answers change the picture, which is composed anew with the view."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual import events
from textual.app import App, ComposeResult
from textual.timer import Timer
from textual.widgets import Input

from gpupool_tui.board import Board
from gpupool_tui.compose import Screen, compose
from gpupool_tui.palette import Palette, palette_of, plain_palette
from gpupool_tui.picture import Picture
from gpupool_tui.view import View
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import Top
from gpupoold.errors import GpupoolError

THEMES = {"dark": "textual-dark", "light": "textual-light", "terminal": "ansi-dark"}
_MESSAGE_S = 8.0

_TIMEOUT_S = 5.0
_RETRY_S = 1.0


class BaseApp(App[None]):
    """The screen and the daemon's answers, without keys."""

    TITLE = "gpupool"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layers: below above; }
    Board { layer: below; }
    #filter { layer: above; dock: bottom; display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    """

    def __init__(self, socket_path: Path, picture: Picture, view: View) -> None:
        """``picture`` has the first answer already."""
        self._has_colours = "NO_COLOR" not in os.environ
        super().__init__(ansi_color=None if self._has_colours else True)
        self.picture = picture
        self.view = view
        self.socket_path = socket_path
        self.board = Board(self._palette())
        self.drawn: Screen | None = None
        self._message_timer: Timer | None = None
        self.poller = Poller(
            socket_path,
            lambda: None if self.view.is_held else PollQuestion.after(self.picture),
            lambda: self.view.interval_s,
            lambda top: self.from_thread(self._on_answer, top),
            lambda reason: self.from_thread(self._on_lost, reason),
        )

    @property
    def is_ascii(self) -> bool:
        """True if the terminal has ASCII only."""
        return self.view.glyphs.is_ascii

    def compose(self) -> ComposeResult:
        yield self.board
        yield Input(placeholder="text to filter by", id="filter", compact=True)

    def on_mount(self) -> None:
        """Show the first screen, then start polling the daemon."""
        self.board.repaint(self._palette())  # the theme may have changed
        self.board.focus()
        self.theme_changed_signal.subscribe(self, lambda _: self.board.repaint(self._palette()))
        self.poller.start()

    def on_unmount(self) -> None:
        self.poller.stop()

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the terminal's new size."""
        self.draw()

    def draw(self) -> None:
        """Draw the present picture."""
        width, height = self.size
        if width and height:
            self.drawn = compose(self.picture, self.view, width, height)
            self.board.show(self.drawn.lines)

    def say(self, text: str, style: str = "") -> None:
        """Show a line at the bottom for a while."""
        self.view.message, self.view.message_style = text, style
        if self._message_timer is not None:
            self._message_timer.stop()
        self._message_timer = self.set_timer(_MESSAGE_S, self._forget_message)
        self.draw()

    # Answers

    def from_thread(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the application's thread and wait for its end."""
        with contextlib.suppress(RuntimeError):  # the application has ended meanwhile
            self.call_from_thread(function, *arguments)

    def _on_answer(self, top: Top) -> None:
        if self.view.is_held:
            return
        is_new = self.picture.restarted(top)
        self.picture.add(top)
        if self.view.lost:
            self.view.lost = ""
            again = "the daemon has started again" if is_new else "connected again"
            self.say(again, "good")
        elif is_new:
            self.say("the daemon has started again", "warn")
        self.draw()

    def _on_lost(self, reason: str) -> None:
        self.view.lost = f"connection lost, trying again: {reason}"
        self.draw()

    def _forget_message(self) -> None:
        self.view.message = ""
        self.draw()

    def _palette(self) -> Palette:
        return palette_of(self.current_theme) if self._has_colours else plain_palette()


@dataclass(frozen=True, slots=True)
class PollQuestion:
    """The parts to request in the next answer."""

    turns_after: int
    events_after: int
    minutes: bool
    pid: int
    """Process id of the daemon at the previous question."""

    @classmethod
    def after(cls, picture: Picture) -> PollQuestion:
        top = picture.latest
        return cls(top.last_turn_id, top.last_event_id, picture.wants_minutes, top.status.pid)


def ask(client: AdminClient, question: PollQuestion) -> Top:
    """Return the daemon's answer; ask a restarted daemon again for all its turns."""
    top = client.top(question.turns_after, question.events_after, minutes=question.minutes)
    if top.status.pid == question.pid:
        return top
    return client.top(0, question.events_after)


class Poller(threading.Thread):
    """Calls ``on_answer`` with each answer, or ``on_lost`` with the reason for none.

    ``next_question`` None means that no answer is wanted now. All callbacks run in this thread.
    """

    def __init__(
        self,
        socket_path: Path,
        next_question: Callable[[], PollQuestion | None],
        interval_s: Callable[[], float],
        on_answer: Callable[[Top], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self._socket_path = socket_path
        self._next_question = next_question
        self._interval_s = interval_s
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._wake = threading.Event()
        self._is_stopping = False

    def ask_now(self) -> None:
        """Do not wait for the rest of the interval."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, which may be waiting for an answer."""
        self._is_stopping = True
        self._wake.set()

    def run(self) -> None:
        with AdminClient(self._socket_path, _TIMEOUT_S) as client:
            while not self._is_stopping:
                began_s = time.monotonic()
                wait_s = self._interval_s() if self._once(client) else _RETRY_S
                self._wake.wait(max(0.0, wait_s - (time.monotonic() - began_s)))
                self._wake.clear()

    def _once(self, client: AdminClient) -> bool:
        question = self._next_question()
        if question is None:
            return True
        try:
            top = ask(client, question)
        except GpupoolError as error:
            if not self._is_stopping:
                self._on_lost(error.message)
            return False
        if not self._is_stopping:
            self._on_answer(top)
        return True
