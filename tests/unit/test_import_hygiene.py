"""What importing a module must not load: the daemon stays small, the command line quick."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = frozenset({"torch", "vllm", "transformers", "textual"})
# They are processes of their own, or run as one.
EXEMPT = (
    "gpupoold.checkpoints.tiny",
    "gpupoold.engine_options.parsing",
    "gpupoold.equal_tokenizers",
    "gpupoold.fleet.actors",
    "gpupoold.frontend",
    "gpupoold.grammar_backends",
    "gpupoold.worker",
)
# Imports the modules one by one; prints which of the forbidden ones each was first to load.
PROBE = """
import importlib, json, sys
modules, forbidden = json.loads(sys.argv[1])
found = {}
for name in modules:
    before = set(sys.modules)
    importlib.import_module(name)
    if loaded := set(forbidden) & set(sys.modules) - before:
        found[name] = sorted(loaded)
print(json.dumps(found))
"""


def modules_of(package: str, source_root: Path) -> Iterator[str]:
    """Names of all modules of a package, found by file, without importing any."""
    for path in sorted((source_root / package).rglob("*.py")):
        parts = path.relative_to(source_root).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_exempt(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in EXEMPT)


def heavy_imports(
    modules: list[str], forbidden: frozenset[str], env: dict[str, str]
) -> dict[str, list[str]]:
    arguments = json.dumps([modules, sorted(forbidden)])
    command = [sys.executable, "-c", PROBE, arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_daemon_modules_load_nothing_heavy(project_env: dict[str, str]) -> None:
    modules = [name for name in modules_of("gpupoold", ROOT) if not is_exempt(name)]
    assert "gpupoold.api.client" in modules
    assert heavy_imports(modules, HEAVY, project_env) == {}


def test_state_modules_load_nothing_heavy(project_env: dict[str, str]) -> None:
    modules = list(modules_of("gpupool_state", ROOT / "state"))
    assert modules
    assert heavy_imports(modules, HEAVY | {"fastapi", "httpx"}, project_env) == {}


def test_command_line_modules_load_no_server(project_env: dict[str, str]) -> None:
    modules = list(modules_of("gpupool_cli", ROOT / "cli"))
    assert "gpupool_cli.tiny" in modules
    servers = {"fastapi", "uvicorn", "aiosqlite", "huggingface_hub"}
    assert heavy_imports(modules, HEAVY | servers, project_env) == {}


# What shows a live screen; text alone does without.
TEXTUAL = ("app", "board", "dialogs")


def test_one_screen_of_text_needs_no_textual(project_env: dict[str, str]) -> None:
    names = {f"gpupool_tui.{name}" for name in TEXTUAL}
    modules = [name for name in modules_of("gpupool_tui", ROOT / "tui") if name not in names]
    assert "gpupool_tui.run" in modules
    servers = {"fastapi", "uvicorn", "aiosqlite", "typer"}
    assert heavy_imports(modules, HEAVY | servers, project_env) == {}


@pytest.mark.parametrize("module", ["gpupoold.checkpoints.tiny", "gpupoold.checkpoints"])
def test_heavy_modules_are_loaded_only_when_used(module: str, project_env: dict[str, str]) -> None:
    assert heavy_imports([module], HEAVY | {"tokenizers"}, project_env) == {}


def test_probe_sees_a_heavy_import(project_env: dict[str, str]) -> None:
    found = heavy_imports(["json", "textual"], HEAVY, project_env)
    assert found == {"textual": ["textual"]}


def test_only_emulated_devices_import_vllms_cpu_worker() -> None:
    """With it torch's CUDA streams and events become such that do nothing, in the whole process."""
    named = {
        path.name
        for path in (ROOT / "gpupoold" / "worker").rglob("*.py")
        if "import vllm.v1.worker.cpu" in (text := path.read_text())
        or "from vllm.v1.worker.cpu" in text
    }
    assert named == {"emulated_worker.py"}
    importers = {
        path.name
        for path in (ROOT / "gpupoold").rglob("*.py")
        if "import emulated_worker" in (text := path.read_text())
        or "from gpupoold.worker.engine.emulated_worker" in text
    }
    assert importers == set()
