"""Dialogs above the board, and the actions on the daemon that a dialog confirms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Label, OptionList, Static

from gpupool_tui.text import size
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import DeviceInfo, RequestInfo, TopModel
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.domain import RemoveMode
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

Call = Callable[[AdminClient], str]


class _Dialog(ModalScreen[Result | None], Generic[Result]):
    """Closes with None on escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close")]

    def __init__(self, *, is_ascii: bool) -> None:
        super().__init__()
        self._is_ascii = is_ascii

    def dress(self, box: Widget, title: str) -> None:
        box.border_title = Text(title).markup
        box.set_class(self._is_ascii, "ascii")

    def action_close(self) -> None:
        self.dismiss(None)


class ChoiceDialog(_Dialog[int]):
    """Describes an action and asks for confirmation or a variant; returns the choice's number."""

    DEFAULT_CSS = _CSS.format(name="ChoiceDialog")

    def __init__(
        self, title: str, text: str, choices: Sequence[str], *, is_ascii: bool = False
    ) -> None:
        super().__init__(is_ascii=is_ascii)
        self._title = title
        self._text = text
        self._choices = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            self.dress(box, self._title)
            yield Static(Text(self._text))
            options = OptionList(*map(Text, self._choices), markup=False)
            yield options
            yield Label("enter: confirm   esc: cancel", classes="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index)


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
        self.query_one("#text", Static).update(text)

    def action_scroll(self, step: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=step, animate=False)


class ActionPlan(NamedTuple):
    """A question with its answers in words, each with a call.

    A call returns a sentence about its result; ``doing`` is shown meanwhile.
    """

    title: str
    text: str
    doing: str
    calls: Sequence[tuple[str, Call]]


def plan_pin(model: TopModel) -> ActionPlan:
    name, is_pinned = model.usage.name, not model.is_pinned

    def call(client: AdminClient) -> str:
        answer = client.pin(name, is_pinned)
        return f"{answer.name}: {'pinned' if answer.is_pinned else 'not pinned any more'}"

    if is_pinned:
        text = "The model's snapshot stays in host memory, also after a restart of the daemon."
        return ActionPlan(f"pin {name}?", text, f"pinning {name}", [("pin", call)])
    text = "The model's snapshot may be evicted from host memory when other models need the memory."
    return ActionPlan(f"unpin {name}?", text, f"unpinning {name}", [("unpin", call)])


def plan_unload(model: TopModel) -> ActionPlan:
    """Plan to unload a model, in a way that its live requests permit."""
    name, num_live = model.usage.name, model.usage.num_live

    def call(mode: RemoveMode, keep_host: bool) -> Call:
        def unload(client: AdminClient) -> str:
            freed = client.unload(name, mode, keep_host=keep_host)
            host = f", {size(freed.host_bytes)} of host memory" if freed.host_bytes else ""
            return f"{freed.name}: freed {size(freed.device_bytes)} on devices{host}"

        return unload

    on_devices = size(model.usage.weights_resident_bytes + model.usage.kv_resident_bytes)
    text = f"{on_devices} on devices, {size(model.usage.cached_bytes)} in host memory.\n"
    text += "The model stays registered; the next request loads the model again."
    if num_live:
        text += f"\n{num_live} live requests."
    modes: list[tuple[RemoveMode, str]] = [("refuse", "")]
    if num_live:
        modes = [("drain", ", after the requests have ended"), ("force", ", ending the requests")]
    calls = [
        (f"free devices{'' if keep else ' and host memory'}{when}", call(mode, keep))
        for mode, when in modes
        for keep in (False, True)
    ]
    return ActionPlan(f"unload {name}?", text, f"unloading {name}", calls)


def plan_cancel(request: RequestInfo) -> ActionPlan:
    request_id = request.request_id

    def call(client: AdminClient) -> str:
        ended = client.cancel(request_id)
        return f"{ended.request_id}: cancelled after {ended.num_output_tokens} tokens"

    text = f"{request_id}\nof {request.model} ends with an error after "
    text += f"{request.num_output_tokens} tokens."
    doing = f"cancelling {request_id}"
    return ActionPlan("cancel this request?", text, doing, [("cancel the request", call)])


def plan_drain(device: DeviceInfo) -> ActionPlan:
    number = device.device

    def drain(client: AdminClient) -> str:
        client.drain(number)
        return f"device {number}: drained; no requests until `undrain`"

    def undrain(client: AdminClient) -> str:
        client.undrain(number)
        return f"device {number}: has work again"

    if device.is_draining:
        text, calls = "The device gets requests again.", [("undrain", undrain)]
        return ActionPlan(f"undrain device {number}?", text, f"undraining {number}", calls)
    text = f"No new requests; its {device.num_requests} requests migrate to other devices or end."
    doing = f"draining device {number}"
    return ActionPlan(f"drain device {number}?", text, doing, [("drain", drain)])


def set_targets(name: str, ttft_s: float, tbt_s: float) -> Call:

    def call(client: AdminClient) -> str:
        model = client.set_model(name, SetModelRequest(ttft_s=ttft_s, tbt_s=tbt_s))
        return (
            f"{model.name}: {format_duration(model.ttft_s)} to the first token,"
            f" {format_duration(model.tbt_s)} between tokens"
        )

    return call
