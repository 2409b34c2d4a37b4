"""Columns of ``gpupool simulate`` that only some runs need."""

from __future__ import annotations

import pytest

from gpupool_cli.planning.simulate import print_rows
from tests.unit.gpupool_cli.planning.test_plot import row


def test_preemptions_have_a_column_only_if_there_are_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    without, preempted = row("one", "gpupool", 40, 1.0), row("two", "gpupool", 40, 0.9)
    print_rows([without])
    assert "PREEMPTED" not in capsys.readouterr().out
    preempted["num_preemptions"] = 17
    print_rows([without, preempted])
    title, first, second = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in (title, first, second)] == ["PREEMPTED", "0", "17"]
