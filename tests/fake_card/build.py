"""Compiles the fake card, and stand-ins for whatever else a program's libraries link to."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.fake_card import NAME

SOURCES = Path(__file__).parent
# What the memory and the streams are made of; needs none of NVIDIA's headers.
DRIVER_SOURCES = ("memory.c", "host.c", "streams.c", "captures.c", "driver.c", "kernels.c")
_ALL = (*DRIVER_SOURCES, "runtime.c", "runtime_kernels.c", "blas.c", "management.c")
LIBRARY = "libfakecard.so"
DRIVER, RUNTIME, MANAGEMENT = "libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"
_CALL = re.compile(r"\bU ((?:cu(?!File)[A-Z]|cuda[A-Z]|__cuda[A-Z]|cublas)\w*)")
_DEFINED = re.compile(r" [TtWV] (\w+)")


def build(folder: Path, site: Path, packages: Path) -> list[Path]:
    """Make the libraries in ``folder``; returns those that every process has to begin with.

    ``packages`` is the folder with torch and NVIDIA's packages, ``site`` that of the bundle.

    Raises:
        subprocess.CalledProcessError: a source does not compile; the compiler has said why.
        FileNotFoundError: there is no compiler.
    """
    # NVIDIA's package lacks the headers of its compiler, of which Triton has some.
    headers = ("nvidia/cu13/include", "triton/backends/nvidia/include")
    includes = [f"-I{packages / folder}" for folder in headers]
    wanted = undefined([*site.glob("vllm/**/*.so"), *_libraries(packages)])
    objects = compile_sources(folder, _ALL, options=includes)
    stubs = folder / "stubs.c"
    stubs.write_text('#include "card.h"\n' + stub_source(wanted - _defined(objects), _not_there))
    objects += compile_sources(folder, [str(stubs)])
    link(folder / LIBRARY, objects)
    # Some packages have a runtime of their own, under a name of its own.
    runtimes = [RUNTIME, *(path.name for path in packages.glob("*.libs/libcudart*"))]
    for name in (DRIVER, MANAGEMENT, *runtimes):
        _link_alias(folder, name)
    return [folder / name for name in (LIBRARY, *runtimes)]


def compile_sources(
    folder: Path, names: Iterable[str], card: str = NAME, options: Sequence[str] = ()
) -> list[Path]:
    """Compile sources to objects in ``folder``, all at the same time; ``card`` is its name."""
    jobs = []
    for name in names:
        target = folder / Path(name).with_suffix(".o").name
        command = [*_compiler(), *options, f"-I{SOURCES}", f'-DCARD_NAME="{card}"']
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
    return set(_CALL.findall(_symbols(["-D", "--undefined-only"], libraries)))


def stub_source(names: Iterable[str], answer: Callable[[str], str]) -> str:
    """Functions of these names that only return something, which ``answer`` has in C."""
    export = '__attribute__((visibility("default")))'
    lines = (f"{export} int {name}(void) {{ return {answer(name)}; }}" for name in sorted(names))
    return "\n".join(lines) + "\n"


def _not_there(name: str) -> str:
    """Functions of cuBLAS would only compute; whoever calls another one has to know."""
    return "OK" if name.startswith("cublas") else f'refuse(NOT_SUPPORTED, "{name}")'


def _libraries(packages: Path) -> list[Path]:
    """Those of torch, and NVIDIA's own but for what is replaced."""
    found = [*packages.glob("torch/lib/*.so*"), *packages.glob("nvidia/**/*.so*")]
    return [path for path in found if not path.name.startswith("libcudart")]


def _link_alias(folder: Path, name: str) -> None:
    """A library that only leads to the one that has everything."""
    source = folder / "alias.c"
    source.write_text("")
    options = [f"-L{folder}", "-Wl,--no-as-needed", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    if name.startswith("libcudart"):  # whose functions programs ask for in a version
        versions = folder / "runtime.map"
        versions.write_text(f"{RUNTIME} {{ }};\n")
        options.append(f"-Wl,--version-script={versions}")
    link(folder / name, [source], options)


def _defined(objects: Iterable[Path]) -> set[str]:
    return set(_DEFINED.findall(_symbols([], objects)))


def _symbols(options: Sequence[str], files: Iterable[Path]) -> str:
    paths = [str(path) for path in files]
    if not paths:
        return ""
    done = subprocess.run(["nm", *options, *paths], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _compiler() -> list[str]:
    flags = ["-std=gnu17", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
    return [os.environ.get("CC", "cc"), *flags]
