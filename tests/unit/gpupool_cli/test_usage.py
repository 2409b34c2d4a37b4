"""``usage``: by model and key, by device, as a table, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json

import pytest

from gpupoold.api.schemas import UseInfo
from gpupoold.domain import DeviceUse
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def use(model: str, api_key: str = "", key_name: str = "", energy_j: float = 0.0) -> UseInfo:
    return UseInfo(
        model=model,
        api_key=api_key,
        key_name=key_name,
        num_requests=3,
        num_prompt_tokens=1200,
        num_output_tokens=450,
        gpu_s=90.0,
        energy_j=energy_j,
    )


@pytest.fixture(autouse=True)
def used(daemon: FakeDaemon) -> None:
    daemon.usage.uses = [
        use("qwen", "AbCd0001", "team", 54_000.0),
        use("qwen", "gone0001"),
        use("yi"),
    ]
    daemon.usage.devices = [
        DeviceUse(
            device=0,
            seconds=600.0,
            computing_s=300.0,
            switching_s=60.0,
            energy_j=72_000.0,
            kv_host_bytes=0,
            kv_host_slab_bytes=0,
        )
    ]


def test_tables(daemon: FakeDaemon, cli: Cli) -> None:
    rows = [line.split() for line in cli("usage", "--since", "30d").stdout.splitlines()]
    assert rows == [
        ["MODEL", "KEY", "REQUESTS", "PROMPT", "TOKENS", "GPU-TIME", "ENERGY"],
        ["qwen", "team", "3", "1200", "450", "90s", "15Wh"],
        ["qwen", "gone0001", "3", "1200", "450", "90s", "-"],
        ["yi", "-", "3", "1200", "450", "90s", "-"],
        [],
        ["DEVICE", "TIME", "COMPUTING", "SWITCHING", "ENERGY"],
        ["0", "10m", "5m", "(50%)", "60s", "(10%)", "20Wh"],
    ]
    assert daemon.queries == [{"since_s": "2592000.0"}]


def test_comma_separated_values(cli: Cli) -> None:
    rows = list(csv.DictReader(io.StringIO(cli("usage", "--csv").stdout)))
    assert [row["key_name"] for row in rows] == ["team", "", ""]
    assert rows[0]["gpu_s"] == "90.0"


def test_json_and_defaults(daemon: FakeDaemon, cli: Cli) -> None:
    answer = json.loads(cli("usage", "--json").stdout)
    assert answer["devices"][0]["energy_j"] == 72_000.0
    assert daemon.queries == [{"since_s": "86400.0"}]
    assert cli("usage", "--json", "--csv").exit_code == 2
