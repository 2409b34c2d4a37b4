"""``gpupool bench`` with a checkout and without."""

from __future__ import annotations

import sys

import pytest
import typer
from typer.testing import CliRunner

from gpupool_cli import main
from gpupool_cli.diagnostics import CliGroup
from gpupoold.errors import Refused
from tests.unit.gpupool_cli.conftest import Cli


def test_a_checkout_has_benchmarks(cli: Cli) -> None:
    shown = cli("bench", "--help").stdout
    assert all(name in shown for name in ("switch", "memory", "load", "overhead"))


def test_an_installation_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.bench.commands", None)
    app = typer.Typer(cls=CliGroup)
    app.command("other")(test_a_checkout_has_benchmarks)
    main.register_bench(app)
    result = CliRunner().invoke(app, ["bench", "switch", "--json"])
    assert result.exit_code == Refused.exit_code
    assert "of a checkout" in result.stderr
