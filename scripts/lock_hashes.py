"""Writes the hashes of all pinned packages into ``requirements/*.txt``.

    python scripts/lock_hashes.py [LOCK ...]

The pins stay as they are; each one gets the SHA-256 of every wheel of that version that pip
may choose on Linux x86-64 with Python 3.11 or 3.12. The hashes come from PyPI's index, by way
of ``uv pip compile``; uv has to be on the PATH (``pip install uv``). A pin that PyPI does not
have, which is torch's CPU build, keeps the hashes that are there: compare these with
https://download.pytorch.org/whl/cpu/torch/ when its version changes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

LOCKS = ("requirements/cpu.txt", "requirements/cuda.txt")
PYTHONS = ("3.11", "3.12")
# Newer than any machine's, so that no wheel is left out: pip chooses among the hashes.
PLATFORM = "x86_64-manylinux_2_40"
HASH_OPTION = "--hash=sha256:"


def main() -> None:
    """Rewrite each lock that is named, by default all."""
    for name in sys.argv[1:] or LOCKS:
        path = Path(name)
        path.write_text(with_hashes(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_hashes(text: str) -> str:
    """Return the text of a lock with the hashes that PyPI has now.

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
    """Return the hashes of each pin of a lock, in the lock's order."""
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
    """Return the SHA-256 of the wheels of each package, by its name."""
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
