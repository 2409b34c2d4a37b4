"""``python -m benchmarks.gpu.bundle``: the packages for a GPU machine without network, in parts.

Downloads the wheels of ``packages.txt`` with pip, removes files that dense bf16 models on Hopper do
not use, and writes a compressed archive, cut into parts that fit a transfer, with a manifest of
checksums. ``unpack.sh`` unpacks the parts into a folder of packages.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZipFile

from benchmarks.gpu.unpack import MANIFEST
from benchmarks.gpu.wheels import Member, members
from gpupoold.errors import Failed, GpupoolError
from gpupoold.units import format_bytes, format_duration

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(__file__).with_name("packages.txt")
DEFAULT_OUT = ROOT / "build" / "gpu-bundle"
# A part and a checkout of 10 MB together stay below 64 MiB, the limit of a transfer.
PART_BYTES = 55_000_000
_PART_NAME = "bundle.tar.xz.{:02}"
# pip downloads a wheel for another platform only if the exact platform tag is given.
_GLIBC_MINORS = (5, 12, 14, 17, 24, 26, 27, 28, 31, 34, 35, 39)
_OLD_PLATFORMS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
_ABIS = ("cp312", "abi3", "none")
_PYTHON = "3.12"
# A window of 64 MiB, which finds the common parts of FlashAttention's variants: 173 MB become 8 MB,
# compared with 43 MB in the wheel.
_PRESET = 9
_FILE_TIME = (
    315532800  # 1980, the earliest in a wheel; constant, so equal wheels give an equal bundle
)
_LAST_LINES = 10


class PartWriter(io.RawIOBase):
    """A file that is cut into parts of ``part_bytes`` while it is written."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        super().__init__()
        self._folder = folder
        self._part_bytes = part_bytes
        self._parts: list[tuple[str, int, Any]] = []
        self._file: Any = None
        self._whole = hashlib.sha256()
        self._num_bytes = 0

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """All of ``data``, in as many parts as it takes."""
        left = memoryview(data).cast("B")
        total = len(left)
        self._whole.update(left)
        self._num_bytes += total
        while left:
            name, used, digest = self._part()
            piece, left = left[: self._part_bytes - used], left[self._part_bytes - used :]
            self._file.write(piece)
            digest.update(piece)
            self._parts[-1] = (name, used + len(piece), digest)
        return total

    def close(self) -> None:
        """End the last part."""
        if self._file is not None:
            self._file.close()
        super().close()

    def manifest(self) -> dict[str, Any]:
        """Sizes and SHA-256 of the whole and of each part."""
        parts = [
            {"name": name, "num_bytes": used, "sha256": digest.hexdigest()}
            for name, used, digest in self._parts
        ]
        whole = {"num_bytes": self._num_bytes, "sha256": self._whole.hexdigest()}
        return {**whole, "parts": parts}

    def _part(self) -> tuple[str, int, Any]:
        """The part to write to, a new one when the last is full."""
        if not self._parts or self._parts[-1][1] == self._part_bytes:
            if self._file is not None:
                self._file.close()
            name = _PART_NAME.format(len(self._parts))
            self._file = (self._folder / name).open("wb")
            self._parts.append((name, 0, hashlib.sha256()))
        return self._parts[-1]


def main() -> int:
    """Download, trim, write; exit code 1 with a reason when that cannot be done."""
    arguments = _parse()
    started_s = time.monotonic()
    wheels = arguments.out / "wheels"
    try:
        download(arguments.packages, wheels)
        found = sorted(wheels.glob("*.whl"))
        manifest = write_bundle(found, arguments.out, arguments.part_bytes, arguments.leave_out)
    except GpupoolError as error:
        print(f"bundle: error: {error}", file=sys.stderr)
        return 1
    for part in manifest["parts"]:
        print(f"{part['name']}  {format_bytes(part['num_bytes'])}  {part['sha256']}")
    size, unpacked = (format_bytes(manifest[key]) for key in ("num_bytes", "unpacked_bytes"))
    took = format_duration(time.monotonic() - started_s)
    print(f"{size} in {arguments.out}, {unpacked} when unpacked, made in {took}")
    return 0


def download(packages: Path, wheels: Path) -> None:
    """The wheels of exactly ``packages`` for the machine, whatever Python runs this.

    Raises:
        Failed: pip cannot have them; the end of what it says is in the message.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", _PYTHON, "--implementation", "cp"]
    for abi in _ABIS:
        command += ["--abi", abi]
    for platform in (*platforms, *_OLD_PLATFORMS):
        command += ["--platform", platform]
    command += ["--dest", str(wheels), "--requirement", str(packages)]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        said = "\n".join(result.stderr.splitlines()[-_LAST_LINES:])
        raise Failed(
            f"pip could not download {packages}:\n{said}", "check the network and the pins"
        )


def write_bundle(
    wheels: Iterable[Path], out: Path, part_bytes: int, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the parts and the manifest of what ``wheels`` have; returns the manifest.

    Files whose paths match a pattern of ``left_out`` are left out too.

    Raises:
        Failed: two wheels have a file of the same path.
    """
    for old in out.glob(_PART_NAME.format(0)[:-2] + "*"):
        old.unlink()
    wheels = list(wheels)
    chosen = [
        member
        for member in _choose(wheels)
        if not any(fnmatchcase(member.path, pattern) for pattern in left_out)
    ]
    with (
        PartWriter(out, part_bytes) as parts,
        lzma.open(cast(IO[bytes], parts), "wb", preset=_PRESET) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for member in chosen:
            _add(tar, member)
    manifest = parts.manifest() | {
        "num_files": len(chosen),
        "unpacked_bytes": sum(member.num_bytes for member in chosen),
        "wheels": [wheel.name for wheel in wheels],
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _choose(wheels: Iterable[Path]) -> list[Member]:
    """What goes in; files of a kind side by side, so that they compress well."""
    chosen: dict[str, Member] = {}
    for wheel in wheels:
        for member in members(wheel):
            other = chosen.setdefault(member.path, member)
            if other is not member:
                both = f"{other.wheel.name} and {wheel.name}"
                raise Failed(f"{both} have a file {member.path} each", "leave one of them out")
    return sorted(chosen.values(), key=lambda member: (Path(member.path).suffix, member.path))


def _add(tar: tarfile.TarFile, member: Member) -> None:
    entry = tarfile.TarInfo(member.path)
    entry.size = member.num_bytes
    entry.mtime = _FILE_TIME
    entry.mode = 0o755 if member.is_executable else 0o644
    with ZipFile(member.wheel) as archive, archive.open(member.name) as file:
        tar.addfile(entry, file)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.bundle", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=DEFAULT_OUT, metavar="OUT_DIR")
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="the pins to bundle")
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES, help="of a part at most")
    parser.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="PATTERN",
        help="paths below site-packages to leave out, such as 'vllm/_moe_C*' (may be repeated)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
