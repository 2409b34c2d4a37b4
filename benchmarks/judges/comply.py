"""The judge ``llm-comply``: OpenAI's chat, Open Responses and Anthropic's messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.judges.verdicts import Outcome, Result, result
from gpupoold.errors import Failed

PACKAGE = "llm-comply==0.5.0"
_HEADERS = ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
FORMATS: Mapping[str, list[str]] = {"openai-chat": [], "open-responses": [], "anthropic": _HEADERS}
_TIMEOUT_S = 900.0


def install(folder: Path) -> Path:
    """Return the program, in an environment of its own below ``folder``.

    Raises:
        Failed: the package cannot be had.
    """
    program = folder / "bin" / "llm-comply"
    if not program.exists():
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "pip"), "install", "--quiet", PACKAGE],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Failed(f"{PACKAGE} cannot be installed: {_last_line(done.stderr)}")
    return program


def judge(program: Path, url: str, model: str) -> dict[str, Result]:
    """Return the results of all tests of all formats, by ``format/test``.

    Raises:
        Failed: the program ended without a report.
    """
    found: dict[str, Result] = {}
    for kind, options in FORMATS.items():
        command = [str(program), "--json", "--format", kind, "-u", f"{url}/v1", "-k", "none"]
        command += ["-m", model, *options]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        try:
            report = json.loads(done.stdout)
        except ValueError as error:
            raise Failed(f"{PACKAGE}, {kind}: {_last_line(done.stderr)}") from error
        found |= {f"{kind}/{one['id']}": read_result(one) for one in report["results"]}
    return found


def read_result(row: Mapping[str, Any]) -> Result:
    """Read a test's row of the program's report; warnings are no failures."""
    text = "; ".join(row.get("errors") or row.get("warnings") or ())
    return result(Outcome(row["status"]), text)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
