"""Checkpoints for tests, made once by a child process and kept below ``build/``."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpupoold.errors import Failed

_ROOT = Path(__file__).resolve().parent.parent
_TOKENIZER = _ROOT / "gpupoold/checkpoints/tiny_tokenizer.py"


def trained_checkpoint(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of ``tiny-trained``; see ``scripts/tiny_trained.py``.

    Raises:
        Failed: the training failed.
    """
    files = ["scripts/tiny_trained.py", "scripts/trained_chats.py"]
    [path] = _made_by("scripts.tiny_trained", [_ROOT / file for file in files], env).values()
    return path


def checkpoints_of(module: str, env: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Return the folders that a module makes (``tests.support.tiny_vision``), by name.

    Raises:
        Failed: the maker failed.
    """
    return _made_by(module, sorted(_ROOT.glob(f"{module.replace('.', '/')}*.py")), env)


def _made_by(module: str, files: list[Path], env: Mapping[str, str] | None) -> dict[str, Path]:
    """Return the folders that a module prints, by name; ``files`` is the module's code.

    They are made again when the code changes. A child process makes them, so that the caller does
    not load torch; the file ``made`` has the folders of a process that succeeded.
    """
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in [*files, _TOKENIZER]))
    maker = module.rpartition(".")[2].replace("_", "-")
    folder = _ROOT / "build" / f"{maker}-models-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", module, str(folder)]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # there may be several callers
        made = folder / "made"
        if not made.exists():
            done = subprocess.run(
                command, cwd=_ROOT, env=env, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise Failed(f"{module} failed: {done.stderr[-4000:]}")
            made.write_text("".join(f"{Path(one).name}\n" for one in done.stdout.splitlines()))
        return {name: folder / name for name in made.read_text().splitlines()}
