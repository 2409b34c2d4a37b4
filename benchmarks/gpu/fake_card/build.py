"""Compiles the fake card, and stand-ins for whatever else a program's libraries link to."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.fake_card import NAME

SOURCES = Path(__file__).parent
# What the memory and the streams are made of; needs none of NVIDIA's headers.
DRIVER = ("memory.c", "host.c", "streams.c", "driver.c")
_ALL = (*DRIVER, "runtime.c", "blas.c", "management.c")
LIBRARY = "libfakecard.so"
RUNTIME = "libcudart.so.13"
_DRIVER_NAME, _MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
_CALL = re.compile(r"\bU ((?:cu(?!File)[A-Z]|cuda[A-Z]|__cuda[A-Z]|cublas)\w*)")
_DEFINED = re.compile(r" [TtWV] (\w+)")


def build(folder: Path, site: Path, packages: Path) -> None:
    """Make the libraries in ``folder``.

    ``packages`` is the folder with torch and NVIDIA's packages, ``site`` that of the bundle.

    Raises:
        subprocess.CalledProcessError: a source does not compile; the compiler has said why.
        FileNotFoundError: there is no compiler.
    """
    # NVIDIA's package lacks the headers of its compiler, of which Triton has some.
    headers = ("nvidia/cu13/include", "triton/backends/nvidia/include")
    includes = [f"-I{packages / folder}" for folder in headers]
    wanted = undefined([*site.glob("vllm/**/*.so"), *_libraries(packages)])
    objects = compile_sources(folder, _ALL, includes)
    stubs = folder / "stubs.c"
    stubs.write_text(stub_source(sorted(wanted - _defined(objects))))
    objects += compile_sources(folder, (str(stubs),))
    link(folder / LIBRARY, objects)
    for name in (_DRIVER_NAME, RUNTIME, _MANAGEMENT):
        _link_alias(folder, name)


def compile_sources(
    folder: Path, names: Iterable[str], options: Sequence[str] = ()
) -> list[Path]:
    """Compile sources to objects in ``folder``; several at a time."""
    jobs = []
    for name in names:
        target = folder / Path(name).with_suffix(".o").name
        command = [*_compiler(), *options, f"-I{SOURCES}", f'-DCARD_NAME="{NAME}"']
        command += ["-c", str(SOURCES / name), "-o", str(target)]
        jobs.append((target, command, subprocess.Popen(command)))
    for _, command, process in jobs:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
    return [target for target, _, _ in jobs]


def link(target: Path, objects: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Make a shared library."""
    command = [*_compiler(), "-shared", f"-Wl,-soname,{target.name}", "-o", str(target)]
    subprocess.run([*command, *map(str, objects), *options, "-lpthread", "-ldl"], check=True)


def undefined(libraries: Iterable[Path]) -> set[str]:
    """The functions of CUDA's libraries that these libraries link to."""
    return set(_CALL.findall(_symbols(["--undefined-only"], libraries)))


def stub_source(names: Iterable[str]) -> str:
    """Functions that only say that they are not there; those of cuBLAS would compute."""
    lines = ['#include "card.h"']
    for name in names:
        body = "OK" if name.startswith("cublas") else f'refuse(NOT_SUPPORTED, "{name}")'
        lines.append(f"EXPORT int {name}(void) {{ return {body}; }}")
    return "\n".join(lines) + "\n"


def _libraries(packages: Path) -> list[Path]:
    """Those of torch, and NVIDIA's own but for what is replaced."""
    found = [*packages.glob("torch/lib/*.so*"), *packages.glob("nvidia/**/*.so*")]
    return [path for path in found if not path.name.startswith("libcudart")]


def _link_alias(folder: Path, name: str) -> None:
    """A library that only leads to the one that has everything."""
    source = folder / "alias.c"
    source.write_text("")
    options = [f"-L{folder}", "-Wl,--no-as-needed", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    if name == RUNTIME:  # programs ask for its functions in the version of that name
        versions = folder / f"{name}.map"
        versions.write_text(f"{name} {{ }};\n")
        options.append(f"-Wl,--version-script={versions}")
    link(folder / name, [source], options)


def _defined(objects: Iterable[Path]) -> set[str]:
    return set(_DEFINED.findall(_symbols([], objects)))


def _symbols(options: Sequence[str], files: Iterable[Path]) -> str:
    dynamic = ["-D"] if options else []
    command = ["nm", *dynamic, *options, *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _compiler() -> list[str]:
    flags = ["-std=gnu17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
    return [os.environ.get("CC", "cc"), *flags]
