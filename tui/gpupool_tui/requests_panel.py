"""The live requests: place, progress, and deadline of the next token."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool_tui.lanes import colour_of
from gpupool_tui.numbers import count, duration
from gpupool_tui.table import TableColumn, figure, plain
from gpupool_tui.text import Line, Span
from gpupool_tui.view import View
from gpupoold.api.schemas import RequestInfo
from gpupoold.units import clean


def key_of(request: RequestInfo) -> str:
    """Return a request's key for selection."""
    return request.request_id


def _model(request: RequestInfo, view: View, width: int) -> Line:
    return (Span(clean(request.model), colour_of(request.model)),)


def due(request: RequestInfo, view: View) -> Line:
    """Return the time to its next token's deadline, or the lateness."""
    if request.next_deadline_in_s < 0:
        return (Span(f"{duration(-request.next_deadline_in_s)} late{view.glyphs.late}", "bad"),)
    return (Span(f"in {duration(request.next_deadline_in_s)}"),)


COLUMNS: Sequence[TableColumn[RequestInfo]] = (
    TableColumn("id", "REQUEST", 12, plain(key_of), key_of, grows=36),
    TableColumn("model", "MODEL", 10, _model, lambda one: one.model, grows=20),
    figure("device", "DEV", 3, lambda one: one.device, descends=False),
    figure("age", "AGE", 6, lambda one: one.age_s, duration),
    figure("prompt", "PROMPT", 6, lambda one: one.num_prompt_tokens, count, 2),
    figure("tokens", "TOKENS", 6, lambda one: one.num_output_tokens, count, 1, zero="dim"),
    TableColumn(
        "due",
        "NEXT DUE",
        12,
        lambda one, view, _: due(one, view),
        lambda one: one.next_deadline_in_s,
        right=True,
    ),
)
