"""Keys that change the view: rows, panels, order, filter, time."""

from __future__ import annotations

from rich.text import Text
from textual import events
from textual.widgets import Input

from gpupool_tui.base_app import THEMES, BaseApp
from gpupool_tui.board import Board
from gpupool_tui.compose import PanelTable, tables
from gpupool_tui.dialogs import TextDialog
from gpupool_tui.keys import KEYS
from gpupool_tui.table import next_sorting
from gpupool_tui.view import Panel, Sorting


class LookingApp(BaseApp):
    """The screen with the keys that do not change the daemon."""

    # Keys: moving

    @property
    def list_panel(self) -> Panel:
        """The panel with selectable rows: lanes are devices."""
        return Panel.DEVICES if self.view.focus is Panel.LANES else self.view.focus

    def _table(self) -> PanelTable:
        return tables(self.picture, self.view)[self.list_panel]

    def action_move(self, step: int) -> None:
        """Select another row; the first time the present one."""
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
        """Select the first or the last row."""
        keys = self._table().keys
        if keys:
            self.view.selected[self.list_panel] = keys[0 if step < 0 else -1]
            self.draw()

    def action_panel(self, number: int) -> None:
        visible = self.drawn.visible if self.drawn is not None else frozenset()
        self.view.go_to(Panel(number), visible)
        self.draw()

    def action_next_panel(self, step: int) -> None:
        """Jump to the next visible panel."""
        shown = [panel for panel in Panel if self.drawn and panel in self.drawn.visible]
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
        """Apply the filter while it is typed."""
        if event.input.id == "filter":
            self.view.filter = event.value
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self._close_filter()

    def on_key(self, event: events.Key) -> None:
        """Leave the filter on escape."""
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
        """Sort the panel's table by another column."""
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
        """Hold the picture, or follow the daemon again."""
        self.view.is_held = not self.view.is_held
        self.poller.ask_now()
        self.draw()

    def action_zoom(self, step: int) -> None:
        """More or less time in the lanes."""
        self.view.zoom(step)
        self.draw()

    def action_interval(self, step: int) -> None:
        """Ask less or more often."""
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
        self.push_screen(TextDialog("keys", text, is_ascii=self.is_ascii))

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
