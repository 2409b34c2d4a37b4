"""A plugin for vLLM that kills the process for some requests, and how to have vLLM load it.

Only tests load it: :func:`install` writes an entry point to a folder, which the tests put on the
import path of a daemon that they start. A request says by its seed in which phase it crashes.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ADD_SEED, STEP_SEED, GRAMMAR_SEED = 666_001, 666_002, 666_003
"""Seeds of requests that crash when they are added, when they are in a step, and while their
grammar is compiled."""

_ENTRY_POINTS = "[vllm.general_plugins]\npoison = tests.functional.poison:register\n"
_LOADS = "crashing-loads"
_METADATA = "Metadata-Version: 2.1\nName: poison\nVersion: 0\n"


def install(folder: Path) -> None:
    """Write what makes ``importlib.metadata`` find the plugin in ``folder``."""
    info = folder / "poison-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    crash_loads_of(folder, "")


def crash_loads_of(folder: Path, model: str) -> None:
    """Let the load of a model crash its worker from now on, or of none if it is empty."""
    (folder / _LOADS).write_text(model)


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.structured_output import StructuredOutputManager

    if getattr(EngineCore, "is_poisoned", False):
        return
    poisoned: set[str] = set()
    add, execute = EngineCore.preprocess_add_request, UniProcExecutor.execute_model
    compile_grammar = StructuredOutputManager._create_grammar

    start = EngineCore.__init__
    loads = Path(str(distribution("poison").locate_file(_LOADS)))

    def start_engine(core: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.model_config.served_model_name == loads.read_text():
            _crash()
        start(core, config, *args, **kwargs)

    def add_request(core: Any, request: Any) -> Any:
        seed = _seed_of(request)
        if seed == ADD_SEED:
            _crash()
        if seed == STEP_SEED:
            poisoned.add(request.request_id)
        return add(core, request)

    def execute_model(executor: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if poisoned & output.num_scheduled_tokens.keys():
            _crash()
        return execute(executor, output, *args, **kwargs)

    def create_grammar(manager: Any, request: Any) -> Any:
        if _seed_of(request) == GRAMMAR_SEED:
            _crash()
        return compile_grammar(manager, request)

    poisonous: Any = EngineCore
    poisonous.is_poisoned = True
    poisonous.__init__ = start_engine
    poisonous.preprocess_add_request = add_request
    UniProcExecutor.execute_model = execute_model  # type: ignore[method-assign]
    StructuredOutputManager._create_grammar = create_grammar  # type: ignore[method-assign]


def _seed_of(request: Any) -> int | None:
    sampling = request.sampling_params
    return None if sampling is None else sampling.seed


def _crash() -> None:
    """As native code does: the signal is this thread's."""
    ctypes.string_at(0)
