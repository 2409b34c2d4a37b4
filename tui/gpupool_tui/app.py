"""``gpupool top``: the screen with all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from gpupool_tui import details
from gpupool_tui.actions import (
    ActionPlan,
    Call,
    plan_cancel,
    plan_drain,
    plan_pin,
    plan_unload,
    set_targets,
)
from gpupool_tui.compose import tables
from gpupool_tui.dialogs import ChoiceDialog, TargetsDialog, TextDialog
from gpupool_tui.looking_app import LookingApp
from gpupool_tui.view import Panel
from gpupoold.api.client import AdminClient
from gpupoold.errors import GpupoolError

_ACTION_TIMEOUT_S = 10.0


class TopApp(LookingApp):
    """Details of rows, and actions on the daemon."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", priority=True)]

    def _selected(self, panel: Panel) -> Any:
        """Return the selected row of a panel, else the first visible one."""
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

    def _open(self, title: str, fields: details.Fields) -> TextDialog:
        dialog = TextDialog(title, details.as_text(fields), is_ascii=self.is_ascii)
        self.push_screen(dialog)
        return dialog

    def _add_later(
        self, dialog: TextDialog, name: str, ask: Callable[[AdminClient], details.Fields]
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
        """Pin or unpin the selected model."""
        self._propose(Panel.MODELS, plan_pin)

    def action_unload(self) -> None:
        self._propose(Panel.MODELS, plan_unload)

    def action_cancel(self) -> None:
        self._propose(Panel.REQUESTS, plan_cancel)

    def action_drain(self) -> None:
        """Drain or undrain the selected device."""
        self._propose(Panel.DEVICES, plan_drain)

    def action_targets(self) -> None:
        """Give the selected model other targets."""
        if not self._may_change(Panel.MODELS):
            return
        model = self._selected(Panel.MODELS)
        if model is None:
            return
        name = model.usage.name

        def chosen(targets: tuple[float, float] | None) -> None:
            if targets is not None:
                self._do(f"changing {name}", set_targets(name, *targets))

        dialog = TargetsDialog(name, model.ttft_s, model.tbt_s, is_ascii=self.is_ascii)
        self.push_screen(dialog, chosen)

    def _may_change(self, panel: Panel) -> bool:
        if self.view.is_read_only:
            self.say("read-only: actions are disabled", "warn")
            return False
        if self.list_panel is panel:
            return True
        self.say(f"this key is for {panel.title.lower()}: press {panel.value} first", "warn")
        return False

    def _propose(self, panel: Panel, plan_of: Callable[[Any], ActionPlan]) -> None:
        if not self._may_change(panel):
            return
        row = self._selected(panel)
        if row is None:
            return
        plan = plan_of(row)

        def chosen(value: str | None) -> None:
            for choice, call in plan.calls:
                if choice.value == value:
                    self._do(plan.doing, call)

        choices = [choice for choice, _ in plan.calls]
        self.push_screen(
            ChoiceDialog(plan.title, plan.text, choices, is_ascii=self.is_ascii), chosen
        )

    def _do(self, doing: str, call: Call) -> None:
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


def _why(client: AdminClient, name: str) -> details.Fields:
    try:
        return details.why_fields(client.why(name))
    except GpupoolError as error:
        return {"why": error.message}
