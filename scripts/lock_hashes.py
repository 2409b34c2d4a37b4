"""Write the hashes of all pinned packages into ``requirements/*.txt``.

    python scripts/lock_hashes.py [LOCK ...]

Pins are unchanged; each pin gets the SHA-256 of every wheel of the version that pip may choose on
Linux x86-64 with Python 3.11 or 3.12. The hashes come from PyPI's index through ``uv pip compile``;
uv must be on the PATH (``pip install uv``). A pin missing from PyPI (torch's CPU build) keeps the
hashes in the file: compare these with https://download.pytorch.org/whl/cpu/torch/ when torch's
version changes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

LOCKS = ("requirements/cpu.txt", "requirements/cuda.txt")
PYTHONS = ("3.11", "3.12")
# A platform newer than any machine's, so that all wheels are included; pip chooses later.
PLATFORM = "x86_64-manylinux_2_40"
HASH_OPTION = "--hash=sha256:"


def main() -> None:
    """Rewrite the named lock files, by default all."""
    for name in sys.argv[1:] or LOCKS:
        path = Path(name)
        path.write_text(with_hashes(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_hashes(text: str) -> str:
    """Return the text of a lock file with PyPI's present hashes.

    Raises:
        subprocess.CalledProcessError: uv could not find a version.
        SystemExit: a package has no wheel.
    """
    comments = [line for line in text.splitlines() if line.startswith("#")]
    known = parse(text)
    fetched = fetch_hashes([pin for pin in known if "+" not in pin])
    lines = list(comments)
    for pin, kept in known.items():
        hashes = kept if "+" in pin else fetched[name_of(pin)]
        if not hashes:
            raise SystemExit(f"{pin}: there is no wheel of this version, or no hash is written")
        lines += [f"{pin} \\", *(f"    {HASH_OPTION}{digest} \\" for digest in sorted(hashes))]
        lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


def parse(text: str) -> dict[str, set[str]]:
    """Return the hashes of each pin of a lock file, in order."""
    found: dict[str, set[str]] = {}
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        if line and not line.startswith("#"):
            pin, *hashes = line.split(HASH_OPTION)
            found[pin.strip()] = {digest.strip() for digest in hashes}
    return found


def name_of(pin: str) -> str:
    """Return the package's name in a pin such as ``numpy==2.4.6``."""
    return pin.partition("==")[0]


def fetch_hashes(pins: list[str]) -> dict[str, set[str]]:
    """Return the SHA-256 of the wheels of each package, by name."""
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        wanted, answer = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        wanted.write_text("\n".join(pins), encoding="utf-8")
        for python in PYTHONS:
            command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--format=pylock.toml"]
            command += [f"--python-version={python}", f"--python-platform={PLATFORM}"]
            subprocess.run([*command, f"--output-file={answer}", str(wanted)], check=True)
            for package in tomllib.loads(answer.read_text(encoding="utf-8"))["packages"]:
                wheels = package.get("wheels", [])
                digests = {wheel["hashes"]["sha256"] for wheel in wheels}
                found.setdefault(package["name"], set()).update(digests)
            answer.unlink()
    return found


if __name__ == "__main__":
    main()
