"""A process that has imported vLLM, and forks the processes of tests that would import vLLM.

Every daemon's fork server imports vLLM, nine seconds of a core; the functional tests start tens
of daemons, and workers and frontends without a daemon. ``imported/sitecustomize.py`` is on the
path of these: a process that begins asks for a fork of this process, with its own descriptors,
arguments and environment, and stays as a proxy that ends with the fork and the fork with it. A
process whose environment may change what vLLM does at its import gets no fork, and imports.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpupoold.system.process import die_with_parent, raise_file_limit, show_as
from tests.support.forks import ForkedProcess, ForkOrder, fork_server, import_path, loading, serve

IMPORTED = Path(__file__).parent / "imported"
ADDRESS = "GPUPOOL_TEST_IMPORT_SERVER"
PROXY = "proxy of process"
_FORK_SERVER = "gpupoold.system.fork_server"
# What vLLM does not read at its import; the import path is compared by itself.
# Three are set by frontends and workers, each to another value, and for simulated devices
# to the value that the CPU build has anyway.
_MAY_DIFFER = (
    *("PYTEST_", "GPUPOOL_", "PYTHONPATH", "PWD", "COLUMNS", "LINES"),
    *("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_TARGET_DEVICE"),
    # An engine in the test's process has set these; an engine in the fork sets the same.
    *("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"),
    *("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"),
    *("VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_DIST_IDENT"),
    # Where a daemon downloads from, and to; no engine downloads.
    *("HF_ENDPOINT", "HF_HUB_CACHE", "HF_XET_CACHE"),
)
# Of emulated devices alone, and of workers; in other processes these do no harm.
_MAY_BE_ABSENT = ("GLIBC_TUNABLES", "OMP_NUM_THREADS")
_PRELOADED = ["gpupoold.frontend.preload", "gpupoold.worker.process"]
# What each fork imports when it begins, or with its first model: half a second of a core.
_LATER = [
    "gpupoold.frontend.server",
    "gpupoold.worker.inspection",
    "gpupoold.worker.plugin",
    "transformers.integrations.mistral.tokenizer",
    "transformers.models.mixtral",
    "model_hosting_container_standards.sagemaker",
    "fastapi.staticfiles",
]
_LATER_OF_VLLM = """
entrypoints.anthropic.api_router entrypoints.cohere.api_router entrypoints.generate.api_router
entrypoints.generate.generative_scoring.api_router
entrypoints.generate.structured_decisions.api_router entrypoints.openai.models.api_router
entrypoints.openai.responses.api_router entrypoints.scale_out.derender.api_router
entrypoints.scale_out.render.api_router entrypoints.scale_out.token_in_token_out.api_router
entrypoints.serve.elastic_ep.api_router entrypoints.serve.instrumentator.metrics
entrypoints.serve.lora.api_router entrypoints.serve.profile.api_router
distributed.elastic_ep.elastic_execute model_executor.layers.fused_moe.experts.cpu_moe
model_executor.layers.quantization.online.base model_executor.models.mixtral
plugins.lora_resolvers.filesystem_resolver plugins.lora_resolvers.hf_hub_resolver
tool_parsers.hermes_tool_parser v1.attention.backends.cpu_attn v1.executor.multiproc_executor
v1.pool.flash_maxsim
"""
_LOG_LEVEL = "info"


@contextlib.contextmanager
def import_server() -> Iterator[str]:
    """Run an import server; yield its address."""
    import pytest  # not for the proxies, of which each would import pytest

    from gpupoold.config.schema import parse_settings
    from gpupoold.control.workers.worker import engine_environment

    # What a daemon adds to its own environment.
    added = engine_environment(parse_settings({"device": [{"kind": "emulated"}]}, "test"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(IMPORTED)
        with fork_server(["tests.functional.import_server"], added) as address:
            yield address


# In the process that would import vLLM


def become_forked(address: str, module: str, arguments: Sequence[str]) -> None:
    """Let the import server fork ``python -m module``, and end as the fork ends.

    Returns at once if there is no fork: the caller then imports vLLM.
    """
    die_with_parent()
    fds = {
        word: int(value) for word, value in itertools.pairwise(arguments) if word.endswith("-fd")
    }
    order = ForkOrder(module, list(arguments), dict(os.environ), os.getcwd(), list(fds))
    try:
        process = ForkedProcess(address, order, [0, 1, 2, *fds.values()])
    except OSError as error:
        print(f"the tests' import server did not fork: {error}", file=sys.stderr, flush=True)
        return
    print("forked by the tests' import server", file=sys.stderr, flush=True)
    for fd in fds.values():
        os.close(fd)
    show_as(module, [PROXY, str(process.pid)])
    status = process.wait()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def forked_for(words: Sequence[str]) -> int | None:
    """The process that a proxy with this command line stands for; None for another process."""
    before, proxy, pid = " ".join(words).rpartition(f" {PROXY} ")
    return int(pid) if proxy and " -m " in before else None


# In the import server


def main(listener_fd: int) -> None:
    """Import vLLM, then fork until the parent ends."""
    from gpupoold.system import fork_server

    raise_file_limit()
    before = dict(os.environ)
    with loading():
        for name in _PRELOADED:
            fork_server._preload(name, _LOG_LEVEL)
        for name in (*_LATER, *(f"vllm.{name}" for name in _LATER_OF_VLLM.split())):
            importlib.import_module(name)
        _adapt_once()
    after = dict(os.environ)
    serve(listener_fd, lambda order: _refusal(order, before, after))


def _adapt_once() -> None:
    """Do what every worker of an emulated device does to vLLM before its first engine."""
    from vllm.platforms.cpu import CpuPlatform

    from gpupoold.worker.engine.cpu_build import adapt_cpu_build

    adapt_cpu_build()
    CpuPlatform.register_triton_kernel_overrides()  # searches all modules, 0.13 s


def _differing(
    asked: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    """The variables of an environment that vLLM may be imported differently for.

    ``before`` and ``after`` are those around the import here. A test that has imported vLLM leaves
    what the import sets to the daemons that it starts.
    """
    names = {
        name
        for name in asked.keys() | before.keys()
        if not name.startswith(_MAY_DIFFER) and not (name in _MAY_BE_ABSENT and name not in asked)
    }
    return sorted(n for n in names if asked.get(n) not in (before.get(n), after.get(n)))


def _has_modules(folder: Path) -> bool:
    """Return whether a folder may have more than plugins of vLLM, which a worker finds later."""
    return folder.is_dir() and any(
        one.suffix != ".dist-info" if one.is_dir() else one.suffix in (".py", ".pth", ".so")
        for one in folder.iterdir()
    )


def _refusal(order: ForkOrder, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Why a fork would not be as an import of its own; empty if it would be."""
    arguments, environment = order.arguments, order.environment
    # Others set the level when they begin, forked or not.
    level = _LOG_LEVEL
    if order.module == _FORK_SERVER:
        level = arguments[arguments.index("--log-level") + 1]
    preloaded = {word for word in arguments if word.endswith(".preload")}
    path = set(import_path(order)).difference(sys.path, [os.getcwd()])
    differing = {
        "environment": _differing(environment, before, after),
        "log level": [] if level == _LOG_LEVEL else [level],
        "preloaded": sorted(preloaded.difference(_PRELOADED)),
        "import path": sorted(folder for folder in path if _has_modules(Path(folder))),
    }
    return ", ".join(f"{what} differs: {names}" for what, names in differing.items() if names)


if __name__ == "__main__":
    main(int(sys.argv[1]))
