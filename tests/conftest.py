"""Fixtures and marker handling for all tests."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings

from scripts.cached_checkpoints import checkpoints_of, trained_checkpoint

pytest_plugins = ["tests.support.durations"]

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = [str(ROOT / name) for name in (".", "cli", "tui", "state")]
# A bundle's packages may be on the path by it alone (docs/internals/gpu.md).
PYTHON_PATH = os.pathsep.join(filter(None, (*SOURCE_ROOTS, os.environ.get("PYTHONPATH"))))
_SLOW_TIMEOUT_S = 900
_FUNCTIONAL = ROOT / "tests" / "functional"
IMPORT_SERVER = "gpupool_import_server"


# No test depends on the speed of the machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no NVIDIA GPU.

    Those marked ``gpu(emulated=True)`` run on emulated devices where that is asked for. Slow tests
    get more time: ranks of a group that run beside them compute and poll on all cores.
    """
    on_emulated = os.environ.get("GPUPOOL_GPU_TESTS_ON") == "emulated"
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))
        mark = item.get_closest_marker("gpu")
        if mark is None or (on_emulated and mark.kwargs.get("emulated")) or has_nvidia_gpu():
            continue
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and this machine has none"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would only pass over modules and tests again
    and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure() -> None:
    """Let tests interrupt what they start, even where this was started with SIGINT ignored, as
    shells start what runs in the background; and trust one certificate."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _trust_one_certificate()


def _trust_one_certificate() -> None:
    """Let HTTP clients here and in child processes read one certificate instead of all.

    Each client reads what the machine trusts, 25 ms of a core, and no test needs that.
    """
    kept = ROOT / "build" / "one-certificate.pem"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        one, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
        written.write_text(one + end)
        written.replace(kept)
    os.environ["SSL_CERT_FILE"] = str(kept)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of xdist the address of the import server that all of these share."""
    if _may_have_functional_tests(node.config):
        node.workerinput[IMPORT_SERVER] = _shared_import_server()


def _may_have_functional_tests(config: pytest.Config) -> bool:
    asked = [config.invocation_params.dir / word.partition("::")[0] for word in config.args]
    return not config.option.keyword and any(
        one.is_relative_to(_FUNCTIONAL) or _FUNCTIONAL.is_relative_to(one) for one in asked
    )


@cache
def _shared_import_server() -> str:
    """Run an import server until this process ends: vLLM is imported beside the collection."""
    from tests.functional.import_server import import_server

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(import_server())


@pytest.fixture(autouse=True)
def log_level() -> None:
    """Reset the level of logs, which daemons and engines in this process set for themselves."""
    logging.getLogger().setLevel(logging.WARNING)


_exit_status = 0


def pytest_sessionfinish(exitstatus: int) -> None:
    """Remember the result for ``pytest_unconfigure``."""
    global _exit_status
    _exit_status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Leave at once where engines ran in this process: at an ordinary exit their compiler
    prints pages of leak reports after the summary."""
    if "triton" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status)


@cache
def has_nvidia_gpu() -> bool:
    """Return whether the NVIDIA driver shows a GPU."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return any(Path("/proc/driver/nvidia/gpus").glob("*"))
    return listing.returncode == 0 and "GPU " in listing.stdout


@pytest.fixture(scope="session")
def project_env() -> dict[str, str]:
    """Environment for child processes that import the project from this checkout."""
    return os.environ | {"PYTHONPATH": PYTHON_PATH}


@pytest.fixture(scope="session")
def tiny_models(project_env: dict[str, str]) -> dict[str, Path]:
    """The tiny checkpoints by name (``tiny-llama``, ...), float32, about 10 MB each.

    Made once and kept below ``build/`` until the code that makes them changes. A child
    process makes them, so that the test process does not load torch. Do not write there.
    """
    return checkpoints_of("gpupoold.checkpoints.tiny", project_env)


@pytest.fixture(scope="session")
def tiny_pooling_models(project_env: dict[str, str]) -> dict[str, Path]:
    """The tiny checkpoints that embed, rank or classify, by name; as ``tiny_models``."""
    return checkpoints_of("tests.support.tiny_pooling", project_env)


@pytest.fixture(scope="session")
def vision_models(project_env: dict[str, str]) -> dict[str, Path]:
    """The tiny vision checkpoints by name (``tiny-qwen2.5-vl``, ...), as ``tiny_models``."""
    return checkpoints_of("tests.support.tiny_vision", project_env)


@pytest.fixture(scope="session")
def trained_model(project_env: dict[str, str]) -> Path:
    """The trained checkpoint (``scripts/tiny_trained.py``), as ``tiny_models``.

    It stops by itself, answers JSON, calls tools and repeats the chats in
    ``scripts/trained_chats.py`` exactly, greedily unless a request says otherwise.
    """
    return trained_checkpoint(project_env)
