"""The judge ``vllm-tests``: API tests of the installed release of vLLM, from its source package.

The tests are fetched with pip at run time. pip cannot build the package here and need not: it
leaves the unpacked source behind, of which ``tests`` is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.judges.verdicts import Outcome, Result, result
from gpupoold.engine_versions import installed_version
from gpupoold.errors import Failed

SETTINGS = "GPUPOOL_JUDGE_SETTINGS"
"""Environment variable with settings of the plugin, see ``engine_plugin.py``."""

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE_ROOTS = [str(_ROOT / name) for name in (".", "cli", "tui", "state")]
_PLUGIN = "benchmarks.judges.engine_plugin"
_TEST_TIMEOUT_S = 300
_KEPT_CHARACTERS = 300


def fetch(folder: Path) -> Path:
    """Return the folder with vLLM's ``tests`` of the installed release, below ``folder``.

    Raises:
        Failed: the source package cannot be had.
    """
    version = (installed_version() or "").partition("+")[0]
    target = folder / f"vllm-{version}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-clean"]
        command += ["--no-build-isolation", "--no-binary", ":all:", f"vllm=={version}"]
        command += ["--dest", scratch]
        env = os.environ | {"TMPDIR": scratch}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        found = next(Path(scratch).glob("**/tests/entrypoints"), None)
        if found is None:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Failed(f"the source package of vllm {version} cannot be had: {last}")
        kept = Path(scratch) / "kept"
        shutil.copytree(found.parent, kept / "tests")
        (kept / "tests" / "conftest.py").unlink()  # imports vLLM's models and a hub
        kept.rename(target)
    return target


def judge(
    target: str, source: Path, paths: Iterable[str], models: Mapping[str, Path], folder: Path
) -> dict[str, Result]:
    """Return the results of the tests in files of vLLM with one of the servers, by their names.

    ``models`` has the folders of the checkpoints that stand for published models, by their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    settings = {
        "target": target,
        "folder": str(folder),
        "models": {name: str(path) for name, path in models.items()},
    }
    command = [sys.executable, "-m", "pytest", "-p", _PLUGIN, "-p", "no:cacheprovider", "-q"]
    command += ["-W", "ignore", "--tb=native", "--continue-on-collection-errors"]
    command += ["-c", os.devnull, "--rootdir", str(source), "--confcutdir", "tests"]
    command += ["--models", "hermes", "--timeout", str(_TEST_TIMEOUT_S), f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", *(f"tests/{path}" for path in paths)]
    env = os.environ | {
        SETTINGS: json.dumps(settings),
        "PYTHONPATH": os.pathsep.join([str(source), *_SOURCE_ROOTS]),
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "pytest.log").open("wb") as log:
        subprocess.run(command, cwd=source, env=env, stdout=log, stderr=log, check=False)
    if not report.exists():
        raise Failed(f"vLLM's tests did not run with {target}", f"see {folder / 'pytest.log'}")
    return read_report(report.read_text())


def read_report(text: str) -> dict[str, Result]:
    """Read pytest's report in JUnit's format: results by ``file::test``."""
    found: dict[str, Result] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}"
        result = _result(case)
        # A test that passes may have an error at its end, as a second case.
        if name not in found or result.outcome is Outcome.FAILED:
            found[name] = result
    return found


def _result(case: ElementTree.Element) -> Result:
    for tags, outcome in ((("failure", "error"), Outcome.FAILED), (("skipped",), Outcome.SKIPPED)):
        for tag in tags:
            found = case.find(tag)
            if found is not None:
                return result(outcome, _first_line(found.get("message") or ""))
    return Result(Outcome.PASSED)


def _first_line(message: str) -> str:
    lines: Sequence[str] = message.strip().splitlines() or [""]
    return lines[0][:_KEPT_CHARACTERS]
