"""The package needs nothing but the standard library, and its data files are packaged."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "gpupoold/latency"
PROBE = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded - set(sys.stdlib_module_names))))
"""


def test_modules_load_the_standard_library_only(project_env: dict[str, str]) -> None:
    modules = [f"gpupoold.latency.{path.stem}" for path in sorted(PACKAGE.glob("[!_]*.py"))]
    assert "gpupoold.latency.profiles" in modules
    command = [sys.executable, "-c", PROBE, *modules]
    done = subprocess.run(command, env=project_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["gpupoold"]


def test_data_files_are_package_data() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["*"]
    data = {path for path in PACKAGE.iterdir() if path.is_file() and path.suffix != ".py"}
    assert {path.name for path in data} == {"hardware.toml", "measured.csv", "shapes.toml"}
    assert {f"*{path.suffix}" for path in data} <= set(patterns)
