"""What a bundle is made of, and that it comes out of its parts as it went in, or not at all."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.bundle import PACKAGES, PART_BYTES, PartWriter, write_bundle
from benchmarks.gpu.check_bundle import make_stubs
from benchmarks.gpu.unpack import MANIFEST
from benchmarks.gpu.wheels import installed_path, is_kept, members
from gpupoold.errors import Failed

ROOT = Path(__file__).resolve().parents[2]
UNPACK = ROOT / "benchmarks" / "gpu" / "unpack.sh"
SMALL_PART = 5000
# Incompressible, so that it takes several parts.
LIBRARY = random.Random(7).randbytes(3 * SMALL_PART)
ENGINE_FILES = {
    "vllm/__init__.py": b"__version__ = '0.32.0'\n",
    "vllm/_C_stable_libtorch.abi3.so": LIBRARY,
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": LIBRARY,
    "vllm/third_party/deep_gemm/include/a.cuh": b"kernel",
    "vllm-0.32.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
    "vllm-0.32.0.dist-info/entry_points.txt": b"[vllm.general_plugins]\na = vllm:plugin\n",
}
OTHER_FILES = {
    "other-1.0.data/purelib/other.py": b"VALUE = 3\n",
    "other-1.0.data/scripts/other": b"#!python\n",
    "other-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
}
UNPACKED = {
    "vllm/__init__.py",
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm-0.32.0.dist-info/METADATA",
    "vllm-0.32.0.dist-info/entry_points.txt",
    "other.py",
    "other-1.0.dist-info/METADATA",
    MANIFEST,
}


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            info = zipfile.ZipInfo(file)
            info.external_attr = (0o755 if file.endswith(".so") else 0o644) << 16
            archive.writestr(info, content)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    wheels = [
        wheel(folder, "vllm-0.32.0-cp38-abi3-linux_x86_64.whl", ENGINE_FILES),
        wheel(folder, "other-1.0-py3-none-any.whl", OTHER_FILES),
    ]
    write_bundle(wheels, folder, SMALL_PART)
    return folder


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> Path:
    """Parts and manifest as they were carried somewhere, to be damaged."""
    carried = tmp_path / "parts"
    carried.mkdir()
    for path in (*made.glob("*.tar.xz.*"), made / MANIFEST):
        shutil.copy(path, carried)
    return carried


def unpack(parts: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [UNPACK, parts, site],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


def files_of(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/_moe_C_stable_libtorch.abi3.so", True),
        ("vllm/_flashmla_C.abi3.so", True),
        ("vllm/_flashmla_extension_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/cumem_allocator.abi3.so", True),
        ("vllm/spinloop.abi3.so", True),
        ("vllm/v1/engine/core.py", True),
        ("vllm/vllm_flash_attn/flash_attn_interface.py", True),
        ("vllm-0.32.0.dist-info/entry_points.txt", True),
        ("xgrammar/libxgrammar_bindings.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("vllm/_qutlass_C.abi3.so", False),
        ("vllm/third_party/deep_gemm/_C_extension.abi3.so", False),
        ("vllm/third_party/deep_gemm/include/cutlass/a.hpp", False),
        ("vllm/vllm-rs", False),
    ],
)
def test_of_vllm_goes_in_what_models_on_hopper_use(path: str, kept: bool) -> None:
    assert is_kept(path) is kept


def test_what_a_wheel_installs_outside_of_site_packages_stays_out() -> None:
    assert installed_path("vllm/__init__.py") == "vllm/__init__.py"
    assert installed_path("a-1.data/platlib/a/b.so") == "a/b.so"
    assert installed_path("a-1.data/scripts/a") is None
    assert installed_path("a-1.data/data/share/a.1") is None


def test_executable_files_stay_so(made: Path) -> None:
    found = {member.path: member for member in members(next(made.glob("vllm-*.whl")))}
    assert found["vllm/_C_stable_libtorch.abi3.so"].is_executable
    assert not found["vllm/__init__.py"].is_executable


def test_writing_goes_on_in_the_next_part(tmp_path: Path) -> None:
    with PartWriter(tmp_path, 10) as writer:
        for piece in (b"abcdefgh", b"ijklmnopqrstuvw", b"", b"xyz1"):
            assert writer.write(piece) == len(piece)
        manifest = writer.manifest()
    written = [(tmp_path / part["name"]).read_bytes() for part in manifest["parts"]]
    assert written == [b"abcdefghij", b"klmnopqrst", b"uvwxyz1"]
    assert [part["num_bytes"] for part in manifest["parts"]] == [10, 10, 7]
    assert manifest["num_bytes"] == 27


def test_unpacking_gives_what_was_kept(parts: Path, tmp_path: Path) -> None:
    manifest = json.loads((parts / MANIFEST).read_text())
    sizes = [(parts / part["name"]).stat().st_size for part in manifest["parts"]]
    assert len(sizes) > 2
    assert sizes[:-1] == [SMALL_PART] * (len(sizes) - 1)
    site = tmp_path / "deep" / "site"
    result = unpack(parts, site)
    assert result.returncode == 0, result.stderr
    assert files_of(site) == UNPACKED
    library = site / "vllm" / "_C_stable_libtorch.abi3.so"
    assert library.read_bytes() == LIBRARY
    assert os.access(library, os.X_OK)
    assert list(site.glob("__pycache__/other.*.pyc")), "not compiled"
    (engine,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert engine.version == "0.32.0"
    assert [one.name for one in engine.entry_points] == ["a"]


def test_the_same_wheels_give_the_same_bundle(made: Path, tmp_path: Path) -> None:
    again = write_bundle(sorted(made.glob("*.whl"), reverse=True), tmp_path, SMALL_PART)
    assert again["sha256"] == json.loads((made / MANIFEST).read_text())["sha256"]


def test_unpacking_again_takes_a_newer_bundle_only(parts: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert unpack(parts, site).returncode == 0
    (site / "mark").touch()
    assert unpack(parts, site).returncode == 0
    assert (site / "mark").exists()
    newer = tmp_path / "newer"
    newer.mkdir()
    write_bundle([wheel(tmp_path, "other-1.0-py3-none-any.whl", OTHER_FILES)], newer, SMALL_PART)
    assert unpack(newer, site).returncode == 0
    assert files_of(site) == {"other.py", "other-1.0.dist-info/METADATA", MANIFEST}


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_a_damaged_part_is_refused_by_name(damage: str, parts: Path, tmp_path: Path) -> None:
    part = parts / "bundle.tar.xz.01"
    content = bytearray(part.read_bytes())
    if damage == "flipped":
        content[1234] ^= 1
        part.write_bytes(content)
    elif damage == "short":
        part.write_bytes(content[:-1])
    else:
        part.unlink()
    result = unpack(parts, tmp_path / "site")
    assert result.returncode == 1
    said = {
        "flipped": "is damaged",
        "short": f"has {SMALL_PART - 1} bytes",
        "missing": "is missing",
    }
    assert f"{part} {said[damage]}" in result.stderr
    assert not (tmp_path / "site").exists()


def test_a_folder_with_other_things_is_left_alone(parts: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "thesis.txt").write_text("x")
    result = unpack(parts, site)
    assert result.returncode == 1
    assert "holds no bundle" in result.stderr
    assert files_of(site) == {"thesis.txt"}


def test_two_wheels_with_the_same_file_are_refused(tmp_path: Path) -> None:
    wheels = [
        wheel(tmp_path, f"{name}-1.0-py3-none-any.whl", {"same.py": b"1"}) for name in ("a", "b")
    ]
    with pytest.raises(Failed, match=r"a-1\.0.* and b-1\.0.* have a file same\.py"):
        write_bundle(wheels, tmp_path, SMALL_PART)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_stand_in_for_nvml_shows_a_hopper_gpu(tmp_path: Path) -> None:
    make_stubs(tmp_path, tmp_path)
    assert (tmp_path / "libcuda.so.1").is_file()
    library = ctypes.CDLL(str(tmp_path / "libnvidia-ml.so.1"))
    count, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    capability = ctypes.byref(major), ctypes.byref(minor)
    assert library.nvmlDeviceGetCudaComputeCapability(None, *capability) == 0
    assert (count.value, major.value, minor.value) == (1, 9, 0)


def pins(path: Path) -> dict[str, str]:
    text = re.sub(r" \\\n +--hash=\S+", "", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = dict(line.replace("===", "==").split("==") for line in lines)
    assert len(found) == len(lines)
    return {name.lower().replace("_", "-").replace(".", "-"): pin for name, pin in found.items()}


def test_the_bundle_has_the_versions_of_the_lock() -> None:
    lock = pins(ROOT / "requirements" / "cuda.txt")
    bundled = pins(PACKAGES)
    assert bundled == {name: lock.get(name) for name in bundled}
    assert bundled.keys() >= {"vllm", "textual", "aiosqlite", "pytest-asyncio"}
    assert not bundled.keys() & {"torch", "triton", "transformers"}, "the machine has its own"
    assert PART_BYTES <= 60_000_000
