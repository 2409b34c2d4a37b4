"""``python -m benchmarks.gpu.check_bundle SITE_DIR``: check that an unpacked bundle is complete.

Imports the engine and gpupool as on the GPU machine, with the bundle's packages. Run the check on
the GPU machine, or with ``--python`` of an environment with the packages of ``machine.txt``.
Without a GPU's driver, stand-ins are built with the system's C compiler: libraries load, and vLLM
makes the same choices as on an H200.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fake_card.build import DRIVER, MANAGEMENT, compile_sources, link, stub_source, undefined

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = (ROOT, ROOT / "cli", ROOT / "state", ROOT / "tui")
_SHOWN = "NVIDIA H200"
_NO_DEVICE = "100"  # CUDA_ERROR_NO_DEVICE


def main() -> int:
    """Exit code 0 when nothing is missing."""
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="gpupool-stub-") as folder:
        environment = bundle_environment(arguments.site.resolve())
        if not _has_driver():
            make_stubs(arguments.site, Path(folder))
            print(f"no {DRIVER} here: stand-ins for an H200, nothing can be computed")
            environment["LD_LIBRARY_PATH"] = _before(folder, environment.get("LD_LIBRARY_PATH"))
        command = [arguments.python, "-m", "benchmarks.gpu.bundle_checks"]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def bundle_environment(site: Path) -> dict[str, str]:
    """What a process needs to find the bundle's packages before the machine's, then gpupool's."""
    folders = os.pathsep.join(map(str, (site, *PACKAGE_FOLDERS)))
    return {**os.environ, "PYTHONPATH": folders}


def make_stubs(site: Path, folder: Path) -> None:
    """Compile the stand-ins into ``folder``.

    The driver has all calls that ``site`` links to, each of which finds no device.
    """
    found = undefined(site.glob("vllm/**/*.so"))
    calls = [
        call for call in found if call[2].isupper()
    ]  # only the driver's calls; the runtime is installed
    stubs = folder / "no_device.c"
    stubs.write_text(stub_source(calls, lambda call: _NO_DEVICE))
    link(folder / DRIVER, compile_sources(folder, [str(stubs)]))
    objects = compile_sources(folder, ["management.c"], _SHOWN, ["-DWITHOUT_CARD"])
    link(folder / MANAGEMENT, objects)


def _has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def _before(folder: str, path: str | None) -> str:
    return folder if not path else f"{folder}{os.pathsep}{path}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.check_bundle", description=__doc__)
    parser.add_argument("site", type=Path, metavar="SITE_DIR", help="made by unpack.sh")
    parser.add_argument("--python", default=sys.executable, help="default: this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
