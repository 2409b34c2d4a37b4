"""``python -m tests.fake_card SITE -- COMMAND``: run a command with the fake card.

    python -m tests.fake_card SITE --python VENV/bin/python -- \\
        python3 -m pytest -m gpu tests/gpu -p no:cacheprovider

SITE is an unpacked bundle, VENV has what ``benchmarks/gpu/machine.txt`` lists. In the command's
environment ``python3`` is that interpreter, and the bundle, gpupool and the libraries are found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.check_bundle import bundle_environment
from tests.fake_card import NAME
from tests.fake_card.build import RUNTIME, build

_STATE_BYTES = 4096
_PACKAGES = "packages"


def main() -> int:
    """The command's exit code, or 1 where the libraries cannot be made."""
    args = _parse()
    with tempfile.TemporaryDirectory(prefix="gpupool-fake-") as name:
        folder = Path(name)
        try:
            libraries = build(folder, args.site.resolve(), _packages(args.python))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"the fake card cannot be made: {error}", file=sys.stderr)
            return 1
        (folder / "state").write_bytes(bytes(_STATE_BYTES))
        _write_programs(folder / "bin", args.python)
        _show_runtime(folder)
        environment = fake_environment(folder, libraries, bundle_environment(args.site.resolve()))
        environment["FAKE_CARD_BYTES"] = str(args.memory)
        return subprocess.run(args.command, env=environment, check=False).returncode


def fake_environment(
    folder: Path, libraries: Sequence[Path], environment: Mapping[str, str]
) -> dict[str, str]:
    """Of processes that are to find the libraries, and the made-up tokens."""
    paths = os.pathsep.join((str(Path(__file__).with_name("path")), str(folder / _PACKAGES)))
    return {
        **environment,
        "LD_PRELOAD": os.pathsep.join(map(str, libraries)),
        "LD_LIBRARY_PATH": _before(str(folder), environment.get("LD_LIBRARY_PATH")),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PATH": _before(str(folder / "bin"), environment.get("PATH")),
        "PYTHONPATH": _before(paths, environment.get("PYTHONPATH")),
        "FAKE_CARD_STATE": str(folder / "state"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "GPUPOOL_GPU_TESTS_ON": "fake-card",
    }


def _write_programs(folder: Path, python: Path) -> None:
    folder.mkdir()
    texts = {
        "nvidia-smi": f"#!/bin/sh\necho 'GPU 0: {NAME}'\n",
        "python3": f'#!/bin/sh\nexec "{python.absolute()}" "$@"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def _show_runtime(folder: Path) -> None:
    """As NVIDIA's package: torch loads the first runtime that it finds so on Python's path."""
    place = folder / _PACKAGES / "nvidia" / "cu13" / "lib"
    place.mkdir(parents=True)
    (place / RUNTIME).symlink_to(folder / RUNTIME)


def _packages(python: Path) -> Path:
    """Where torch is that this interpreter has."""
    ask = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip()).parent


def _before(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, (first, rest)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.fake_card", description=__doc__)
    parser.add_argument("site", type=Path, metavar="SITE", help="made by unpack.sh")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument(
        "--memory",
        type=int,
        default=64 << 30,
        metavar="BYTES",
        help="of the card (default: %(default)s); what is written takes the host's",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
