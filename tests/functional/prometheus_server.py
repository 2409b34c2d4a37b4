"""A Prometheus of one's own, for tests of what it is to read; from the Debian package."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

_CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: gpupool
    static_configs: [{{targets: ["{target}"]}}]
"""


NOT_INSTALLED = "Prometheus is not installed (Debian: apt-get install prometheus)"


def is_installed() -> bool:
    """Return whether Prometheus and its tool are here."""
    return all(map(shutil.which, ("prometheus", "promtool")))


def promtool(*arguments: str | Path, stdin: bytes = b"") -> str:
    """Run ``promtool``, which must find nothing wrong; what it says. Skips without it."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=60)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=20)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series and values now; fails when it is no PromQL."""
        body = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert body["status"] == "success", f"{expression}: {body}"
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Of the only series, None without any, or while Prometheus is starting."""
        try:
            result = self.query(expression)
        except (httpx.TransportError, json.JSONDecodeError):
            return None
        return float(result[0]["value"][1]) if result else None

    def close(self) -> None:
        """Ask no more."""
        self._http.close()


@contextlib.contextmanager
def running_prometheus(scraped_url: str, folder: Path) -> Iterator[Prometheus]:
    """One that scrapes the daemon behind ``scraped_url`` four times a second, once it is up."""
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(target=scraped_url.removeprefix("http://")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    prometheus = Prometheus(f"http://{address}")
    try:
        yield prometheus
    finally:
        prometheus.close()
        process.terminate()
        process.wait(30)
