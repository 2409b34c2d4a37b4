"""Dialogs above the board: a choice to confirm, targets to type, text to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Label, OptionList, Static

from gpupoold.units import format_duration, parse_duration_s

Result = TypeVar("Result")

_CSS = """
{name} {{ align: center middle; }}
{name} > .box {{
    width: auto; height: auto; max-width: 92%; max-height: 92%; padding: 0 1;
    background: $surface; border: round $primary; border-title-style: bold;
}}
{name} > .ascii {{ border: ascii $primary; }}
{name} OptionList, {name} OptionList:focus {{
    height: auto; width: auto; min-width: 46; border: none; padding: 0; margin: 1 0;
    background: $surface;
}}
{name} Input {{ width: 40; border: none; height: 1; padding: 0 1; margin-bottom: 1; }}
{name} .error {{ color: $text-error; height: auto; }}
{name} .hint {{ color: $text-muted; }}
{name} Label, {name} Static {{ width: auto; max-width: 100%; }}
"""


class DialogChoice(NamedTuple):
    """An answer to a question, in words."""

    label: str
    value: str


class _Dialog(ModalScreen[Result | None], Generic[Result]):
    """Closes with None on escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close")]

    def __init__(self, *, is_ascii: bool) -> None:
        super().__init__()
        self._is_ascii = is_ascii

    def dress(self, box: Widget, title: str) -> None:
        """Add a frame with a title, in characters of the terminal."""
        box.border_title = Text(title).markup
        box.set_class(self._is_ascii, "ascii")

    def action_close(self) -> None:
        self.dismiss(None)


class ChoiceDialog(_Dialog[str]):
    """Describes an action and asks for confirmation or a variant; returns the chosen value."""

    DEFAULT_CSS = _CSS.format(name="ChoiceDialog")

    def __init__(
        self, title: str, text: str, choices: Sequence[DialogChoice], *, is_ascii: bool = False
    ) -> None:
        super().__init__(is_ascii=is_ascii)
        self._title = title
        self._text = text
        self._choices = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            self.dress(box, self._title)
            yield Static(Text(self._text))
            options = OptionList(*(Text(choice.label) for choice in self._choices), markup=False)
            yield options
            yield Label("enter: confirm   esc: cancel", classes="hint")

    def on_mount(self) -> None:
        """Textual's: keys go to the choices."""
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._choices[event.option_index].value)


class TargetsDialog(_Dialog[tuple[float, float]]):
    """New targets of a model, in seconds."""

    DEFAULT_CSS = _CSS.format(name="TargetsDialog")

    def __init__(self, model: str, ttft_s: float, tbt_s: float, *, is_ascii: bool = False) -> None:
        super().__init__(is_ascii=is_ascii)
        self._model = model
        self._before = (ttft_s, tbt_s)

    def compose(self) -> ComposeResult:
        ttft_s, tbt_s = self._before
        with Vertical(classes="box") as box:
            self.dress(box, f"targets of {self._model}")
            yield Label("time to first token")
            yield Input(format_duration(ttft_s), id="ttft", compact=True)
            yield Label("time between tokens")
            yield Input(format_duration(tbt_s), id="tbt", compact=True)
            yield Static("", id="problem", classes="error", markup=False)
            yield Label("enter: set both   tab: next field   esc: cancel", classes="hint")

    def on_mount(self) -> None:
        """Textual's: keys go to the first."""
        self.query_one("#ttft", Input).focus()

    def on_input_submitted(self) -> None:
        """Check the input after enter; show an error without closing."""
        try:
            self.dismiss((self._read("ttft"), self._read("tbt")))
        except ValueError as error:
            self.query_one("#problem", Static).update(str(error))

    def _read(self, name: str) -> float:
        field = self.query_one(f"#{name}", Input)
        try:
            seconds = parse_duration_s(field.value)
            if not 0 < seconds < math.inf:
                raise ValueError(f"{field.value!r} must be more than zero")
        except ValueError:
            field.focus()
            raise
        return seconds


class TextDialog(_Dialog[bool]):
    """Text to read, of any length."""

    DEFAULT_CSS = _CSS.format(name="TextDialog")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,q,question_mark", "close", "close"),
        Binding("j,down", "scroll(1)", "down"),
        Binding("k,up", "scroll(-1)", "up"),
    ]

    def __init__(self, title: str, text: Text, *, is_ascii: bool = False) -> None:
        super().__init__(is_ascii=is_ascii)
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box") as box:
            self.dress(box, self._title)
            yield Static(self._text, id="text")
            yield Label("esc: back", classes="hint")

    def show(self, text: Text) -> None:
        """Show other text, when more is known."""
        self.query_one("#text", Static).update(text)

    def action_scroll(self, step: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=step, animate=False)
