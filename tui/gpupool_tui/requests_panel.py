"""The live requests: place, progress, and deadline of the next token."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool_tui.lanes import colour_of
from gpupool_tui.numbers import NOTHING, count, duration
from gpupool_tui.table import TableColumn
from gpupool_tui.text import Line, Span
from gpupool_tui.view import View
from gpupoold.api.schemas import RequestInfo
from gpupoold.printable import clean


def key_of(request: RequestInfo) -> str:
    """Return a request's key for selection."""
    return request.request_id


def _id(request: RequestInfo, view: View, width: int) -> Line:
    return (Span(clean(request.request_id)),)


def _model(request: RequestInfo, view: View, width: int) -> Line:
    return (Span(clean(request.model), colour_of(request.model)),)


def _device(request: RequestInfo, view: View, width: int) -> Line:
    if request.device is None:
        return (Span(NOTHING, "dim"),)
    return (Span(str(request.device)),)


def _age(request: RequestInfo, view: View, width: int) -> Line:
    return (Span(duration(request.age_s)),)


def _prompt(request: RequestInfo, view: View, width: int) -> Line:
    return (Span(count(request.num_prompt_tokens)),)


def _tokens(request: RequestInfo, view: View, width: int) -> Line:
    number = request.num_output_tokens
    return (Span(count(number), "" if number else "dim"),)


def due(request: RequestInfo, view: View) -> Line:
    """Return the time to its next token's deadline, or the lateness."""
    if request.next_deadline_in_s < 0:
        return (Span(f"{duration(-request.next_deadline_in_s)} late{view.glyphs.late}", "bad"),)
    return (Span(f"in {duration(request.next_deadline_in_s)}"),)


def _due(request: RequestInfo, view: View, width: int) -> Line:
    return due(request, view)


COLUMNS: Sequence[TableColumn[RequestInfo]] = (
    TableColumn("id", "REQUEST", 12, _id, lambda one: one.request_id, grows=36),
    TableColumn("model", "MODEL", 10, _model, lambda one: one.model, grows=20),
    TableColumn(
        "device",
        "DEV",
        3,
        _device,
        lambda one: -1 if one.device is None else one.device,
        right=True,
    ),
    TableColumn("age", "AGE", 6, _age, lambda one: one.age_s, descends=True, right=True),
    TableColumn(
        "prompt",
        "PROMPT",
        6,
        _prompt,
        lambda one: one.num_prompt_tokens,
        descends=True,
        right=True,
        rank=2,
    ),
    TableColumn(
        "tokens",
        "TOKENS",
        6,
        _tokens,
        lambda one: one.num_output_tokens,
        descends=True,
        right=True,
        rank=1,
    ),
    TableColumn("due", "NEXT DUE", 12, _due, lambda one: one.next_deadline_in_s, right=True),
)
