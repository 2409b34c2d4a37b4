"""What a daemon tells at ``/metrics`` on its admin socket."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import admin_http


def scrape(daemon: PrivateDaemon) -> dict[str, Metric]:
    """The families by the name that people write. They may be half a second old."""
    with admin_http(daemon) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {f"{one.name}{'_total' * (one.type == 'counter')}": one for one in families}


def value(daemon: PrivateDaemon, sample: str, **labels: str) -> float | None:
    """Of the samples with this name and, among others, these labels: their sum, or None."""
    found = [
        one.value
        for family in scrape(daemon).values()
        for one in family.samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    return sum(found) if found else None
