"""The Grafana dashboard of the examples, and the queries in it."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.conftest import ROOT

PATH = ROOT / "examples" / "grafana" / "gpupool.json"
_VARIABLES = {"$instance": ".*", "$model": ".*", "$device": ".*", "$__rate_interval": "1m"}
_NOT_NAMES = re.compile(r'\{[^}]*\}|"[^"]*"|\b(?:by|on|group_left)\s*\([^)]*\)')


def dashboard() -> dict[str, Any]:
    """The file."""
    loaded: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return loaded


def queries() -> list[tuple[str, str]]:
    """Each panel's title and a query of it, with what Grafana would put in for the variables."""
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in _VARIABLES.items():
                expression = expression.replace(variable, value)
            found.append((panel["title"], expression))
    return found


def metric_names(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads."""
    return set(re.findall(r"\b(?:gpupool|process)_\w+", _NOT_NAMES.sub(" ", expression)))
