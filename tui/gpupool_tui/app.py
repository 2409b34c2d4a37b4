"""``gpupool top``: the screen, composed anew after each answer and each key."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widgets import Input

from gpupool_tui import details, dialogs
from gpupool_tui.board import KEYS, Board, Palette, palette_of, plain_palette
from gpupool_tui.compose import Screen, compose
from gpupool_tui.panels import PanelTable, tables
from gpupool_tui.picture import Picture, Poller
from gpupool_tui.table import next_sorting
from gpupool_tui.view import Panel, Sorting, View
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import Top
from gpupoold.errors import GpupoolError

THEMES = {"dark": "textual-dark", "light": "textual-light", "terminal": "ansi-dark"}
_MESSAGE_S = 8.0
_ACTION_TIMEOUT_S = 10.0


class TopApp(App[None]):
    """The screen with all keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", priority=True)]
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
            lambda: None if self.view.is_held else self.picture,
            lambda: self.view.interval_s,
            lambda top: self.from_thread(self._on_answer, top),
            lambda reason: self.from_thread(self._on_lost, reason),
        )

    @property
    def is_ascii(self) -> bool:
        return self.view.glyphs.is_ascii

    def compose(self) -> ComposeResult:
        yield self.board
        yield Input(placeholder="text to filter by", id="filter", compact=True)

    def on_mount(self) -> None:
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
        width, height = self.size
        if width and height:
            self.drawn = compose(self.picture, self.view, width, height)
            self.board.show(self.drawn.lines)

    def say(self, text: str, style: str = "") -> None:
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

    # Keys: moving

    @property
    def list_panel(self) -> Panel:
        """The panel with selectable rows: lanes are devices."""
        return Panel.DEVICES if self.view.focus is Panel.LANES else self.view.focus

    def _table(self) -> PanelTable:
        return tables(self.picture, self.view)[self.list_panel]

    def action_move(self, step: int) -> None:
        keys = self._table().keys
        if not keys:
            return
        selected = self.view.selected.get(self.list_panel)
        if selected in keys:
            index = min(max(0, keys.index(selected) + step), len(keys) - 1)
        else:
            index = len(keys) - 1 if self.list_panel is Panel.EVENTS else 0
        self.view.selected[self.list_panel] = keys[index]
        self.draw()

    def action_edge(self, step: int) -> None:
        keys = self._table().keys
        if keys:
            self.view.selected[self.list_panel] = keys[0 if step < 0 else -1]
            self.draw()

    def action_panel(self, number: int) -> None:
        self.view.go_to(Panel(number), self.drawn.places if self.drawn is not None else ())
        self.draw()

    def action_next_panel(self, step: int) -> None:
        shown = [panel for panel in Panel if self.drawn and panel in self.drawn.places]
        if self.view.maximised is not None:
            shown = list(Panel)
        index = shown.index(self.view.focus) if self.view.focus in shown else 0
        panel = shown[(index + step) % len(shown)]
        if self.view.maximised is not None:
            self.view.maximised = panel
        self.view.focus = panel
        self.draw()

    def action_maximise(self) -> None:
        """Let the panel have the whole screen, or no more."""
        self.view.maximised = None if self.view.maximised else self.view.focus
        self.draw()

    def action_step_back(self) -> None:
        """Undo one step of navigation."""
        view = self.view
        if view.message:
            view.message = ""
        elif view.maximised is not None:
            view.maximised = None
        elif view.filter:
            self.query_one("#filter", Input).value = ""
            view.filter = ""
        else:
            view.selected.pop(self.list_panel, None)
        self.draw()

    # Keys: looking

    def action_filter(self) -> None:
        """Open the line to type a filter in."""
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self.view.filter = event.value
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self._close_filter()

    def on_key(self, event: events.Key) -> None:
        field = self.query_one("#filter", Input)
        if event.key == "escape" and field.has_class("open"):
            event.prevent_default()
            event.stop()
            field.value = ""
            self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.board.focus()

    def action_sort(self, step: int) -> None:
        table, sorting = self._table(), self.view.sorting.get(self.list_panel)
        if sorting is not None:
            self.view.sorting[self.list_panel] = next_sorting(table.columns, sorting, step)
            self.draw()

    def action_reverse(self) -> None:
        """Turn the order of the panel's table round."""
        sorting = self.view.sorting.get(self.list_panel)
        if sorting is not None:
            turned = Sorting(sorting.column, not sorting.is_reversed)
            self.view.sorting[self.list_panel] = turned
            self.draw()

    def action_hold(self) -> None:
        self.view.is_held = not self.view.is_held
        self.poller.ask_now()
        self.draw()

    def action_zoom(self, step: int) -> None:
        """More or less time in the lanes."""
        self.view.zoom(step)
        self.draw()

    def action_interval(self, step: int) -> None:
        self.view.change_interval(step)
        self.poller.ask_now()
        self.draw()

    def action_theme(self) -> None:
        """Dark, light, or the terminal's own colours."""
        names = list(THEMES.values())
        index = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(index + 1) % len(names)]

    def action_help(self) -> None:
        text = help_text(is_read_only=self.view.is_read_only)
        self.push_screen(dialogs.TextDialog("keys", text, is_ascii=self.is_ascii))

    # The mouse

    def on_board_clicked(self, event: Board.Clicked) -> None:
        """Select a clicked row; move in the panel below the wheel."""
        if self.drawn is None:
            return
        for panel, lines in self.drawn.places.items():
            if event.y in lines:
                self.view.focus = panel
        if event.step:
            self.action_move(event.step)
            return
        if event.y in self.drawn.rows:
            panel, key = self.drawn.rows[event.y]
            self.view.selected[panel] = key
        self.draw()

    # Details, and actions on the daemon

    def _selected(self, panel: Panel) -> Any:
        table = tables(self.picture, self.view)[panel]
        keys = table.keys
        if not keys:
            return None
        selected = self.view.selected.get(panel)
        if selected not in keys:
            selected = keys[-1] if panel is Panel.EVENTS else keys[0]
            self.view.selected[panel] = selected
            self.draw()
        return table.rows[keys.index(selected)]

    def action_details(self) -> None:
        """All about the selected row."""
        row = self._selected(self.list_panel)
        if row is None:
            return
        match self.list_panel:
            case Panel.DEVICES:
                fields = details.device_fields(row, self.picture, self.view)
                self._open(f"device {row.device}", fields)
            case Panel.MODELS:
                name = row.usage.name
                dialog = self._open(name, details.model_fields(row, None))
                self._add_later(
                    dialog, name, lambda client: details.model_fields(row, client.model(name))
                )
            case Panel.REQUESTS:
                fields = details.request_fields(row, self.view)
                self._add_later(self._open("request", fields), row.request_id, lambda _: fields)
            case _:
                self._open("event", details.event_fields(row, self.view))

    def _open(self, title: str, fields: details.Fields) -> dialogs.TextDialog:
        dialog = dialogs.TextDialog(title, details.as_text(fields), is_ascii=self.is_ascii)
        self.push_screen(dialog)
        return dialog

    def _add_later(
        self, dialog: dialogs.TextDialog, name: str, ask: Callable[[AdminClient], details.Fields]
    ) -> None:
        """Extend a dialog after the daemon's answer with further facts and explanations."""

        def work() -> None:
            try:
                with AdminClient(self.socket_path, _ACTION_TIMEOUT_S) as client:
                    text = details.as_text(ask(client) | _why(client, name))
            except GpupoolError as error:
                text = Text(details.clean_lines(str(error)))
            self.from_thread(lambda: dialog.show(text) if dialog.is_attached else None)

        self.run_worker(work, thread=True, exit_on_error=False)

    def action_pin(self) -> None:
        self._propose(Panel.MODELS, dialogs.plan_pin)

    def action_unload(self) -> None:
        self._propose(Panel.MODELS, dialogs.plan_unload)

    def action_cancel(self) -> None:
        self._propose(Panel.REQUESTS, dialogs.plan_cancel)

    def action_drain(self) -> None:
        self._propose(Panel.DEVICES, dialogs.plan_drain)

    def action_targets(self) -> None:
        if not self._may_change(Panel.MODELS):
            return
        model = self._selected(Panel.MODELS)
        if model is None:
            return
        name = model.usage.name

        def chosen(targets: tuple[float, float] | None) -> None:
            if targets is not None:
                self._do(f"changing {name}", dialogs.set_targets(name, *targets))

        dialog = dialogs.TargetsDialog(name, model.ttft_s, model.tbt_s, is_ascii=self.is_ascii)
        self.push_screen(dialog, chosen)

    def _may_change(self, panel: Panel) -> bool:
        if self.view.is_read_only:
            self.say("read-only: actions are disabled", "warn")
            return False
        if self.list_panel is panel:
            return True
        self.say(f"this key is for {panel.title.lower()}: press {panel.value} first", "warn")
        return False

    def _propose(self, panel: Panel, plan_of: Callable[[Any], dialogs.ActionPlan]) -> None:
        if not self._may_change(panel):
            return
        row = self._selected(panel)
        if row is None:
            return
        plan = plan_of(row)

        def chosen(number: int | None) -> None:
            if number is not None:
                self._do(plan.doing, plan.calls[number][1])

        choices = [choice for choice, _ in plan.calls]
        self.push_screen(
            dialogs.ChoiceDialog(plan.title, plan.text, choices, is_ascii=self.is_ascii), chosen
        )

    def _do(self, doing: str, call: dialogs.Call) -> None:
        """Run a change in a thread of its own, because a change may be slow."""

        def work() -> None:
            try:
                with AdminClient(self.socket_path, _ACTION_TIMEOUT_S) as client:
                    text, style = call(client), "good"
            except GpupoolError as error:
                text, style = str(error), "bad"
            self.from_thread(self.say, text, style)
            self.poller.ask_now()

        self.say(f"{doing} ...")
        self.run_worker(work, thread=True, exit_on_error=False)


def help_text(*, is_read_only: bool) -> Text:
    text = Text()
    for group, keys in KEYS:
        is_off = is_read_only and any(key.is_change for key in keys)
        text.append(group, "bold")
        text.append("  (not here: read-only)\n" if is_off else "\n")
        for key in keys:
            text.append(f"  {key.shown:<11}", "bold")
            text.append(f"{key.meaning}\n")
    text.rstrip()
    return text


def _why(client: AdminClient, name: str) -> details.Fields:
    try:
        return details.why_fields(client.why(name))
    except GpupoolError as error:
        return {"why": error.message}
