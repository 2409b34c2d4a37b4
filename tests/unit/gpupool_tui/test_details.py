"""Details of what is selected."""

from __future__ import annotations

from gpupool_tui.details import why_fields
from gpupoold.api.schemas_explain import Why
from tests.unit.gpupool_cli.test_why import MODEL


def test_gaps_of_paced_streams_are_shown_as_released() -> None:
    assert "paced gaps" not in why_fields(Why(model=MODEL))
    gaps = {"paced_gap_p50_s": 0.1, "paced_gap_p99_s": 0.12}
    fields = why_fields(Why(model=MODEL.model_copy(update=gaps)))
    assert fields["paced gaps"] == "100ms (half), 120ms (99 of 100), as released since the start"
