"""``python -m benchmarks.gpu.check_bundle SITE_DIR``: whether an unpacked bundle is enough.

Imports the engine and gpupool as the GPU machine would, with its packages: run it there, or
with ``--python`` of an environment that has what ``machine.txt`` lists. Without a GPU's driver
it makes stand-ins with the system's C compiler: libraries load, and vLLM chooses as on an H200.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = (ROOT, ROOT / "cli", ROOT / "state", ROOT / "tui")
STUB_SOURCE = Path(__file__).with_name("stub_driver.c")
_DRIVER, _MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
_DRIVER_CALL = re.compile(r"\bU (cu[A-Z]\w*)")


def main() -> int:
    """Exit code 0 when nothing is missing."""
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="gpupool-stub-") as folder:
        environment = bundle_environment(arguments.site.resolve())
        if not _has_driver():
            make_stubs(arguments.site, Path(folder))
            print(f"no {_DRIVER} here: stand-ins for an H200, nothing can be computed")
            environment["LD_LIBRARY_PATH"] = _before(folder, environment.get("LD_LIBRARY_PATH"))
        command = [arguments.python, "-m", "benchmarks.gpu.bundle_checks"]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def bundle_environment(site: Path) -> dict[str, str]:
    """What a process needs to find the bundle's packages before the machine's, then gpupool's."""
    folders = os.pathsep.join(map(str, (site, *PACKAGE_FOLDERS)))
    return {**os.environ, "PYTHONPATH": folders}


def make_stubs(site: Path, folder: Path) -> None:
    """Compile the stand-ins into ``folder``; the driver's has all calls that ``site`` links to."""
    calls: set[str] = set()
    for library in site.glob("vllm/**/*.so"):
        symbols = _output(["nm", "-D", "--undefined-only", str(library)])
        calls.update(_DRIVER_CALL.findall(symbols))
    stubs = "".join(f"STUB({call}) " for call in sorted(calls))
    _compile(folder / _DRIVER, [f"-DSTUB_CALLS={stubs}"])
    _compile(folder / _MANAGEMENT, [])


def _compile(target: Path, options: list[str]) -> None:
    compiler = os.environ.get("CC", "cc")
    shared = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{target.name}"]
    _output([*shared, *options, "-o", str(target), str(STUB_SOURCE)])


def _output(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
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
