"""Whether a group of GPUs can divide a model, by building vLLM's modules without memory.

vLLM finds a dimension that is not divisible, or quantised blocks that an equal part would cut, only
while a model's modules are built. Modules on PyTorch's ``meta`` device have shapes and no memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model

from gpupoold.worker.engine.load_errors import described

_GLOO = "gloo"

Part = Callable[[VllmConfig], ModelConfig | None]


def undivided(make_config: Callable[[], VllmConfig], degrees: Iterable[int]) -> dict[int, str]:
    """Return the ``degrees`` that cannot divide a model or its drafter, with vLLM's reason.

    ``make_config`` returns a new configuration of the model for one GPU. A model that cannot be
    built without memory for one GPU is not judged, nor is such a drafter.
    """
    degrees = list(degrees)
    if not degrees:
        return {}
    _create_groups()
    problems: dict[int, str] = {}
    for whose, part in (("", _target), ("the drafter: ", _drafter)):
        if _problem(make_config(), 1, part):
            continue
        for degree in degrees:
            if degree not in problems and (problem := _problem(make_config(), degree, part)):
                problems[degree] = f"{whose}{problem}"
    return problems


def _target(config: VllmConfig) -> ModelConfig | None:
    return config.model_config


def _drafter(config: VllmConfig) -> ModelConfig | None:
    """Return the configuration of a drafter with weights of its own, None without."""
    drafts = config.speculative_config
    has_drafter = drafts is not None and (drafts.use_eagle() or drafts.uses_draft_model())
    return drafts.draft_model_config if drafts is not None and has_drafter else None


def _problem(config: VllmConfig, degree: int, part: Part) -> str:
    """Return the error of building the first GPU's part of a model; empty without an error."""
    model = part(config)
    if model is None:
        return ""
    # Not public: the group whose size the modules read. No collective runs while they are built.
    group = parallel_state.get_tp_group()
    config.parallel_config.tensor_parallel_size = degree
    try:
        model.verify_with_parallel_config(config.parallel_config)
        group.world_size = degree
        with set_current_vllm_config(config), torch.device("meta"):
            initialize_model(config, model_config=model)
    except Exception as error:
        return described(error)
    finally:
        group.world_size = 1
    return ""


def _create_groups() -> None:
    """Create process groups of this process alone."""
    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{Path(tempfile.mkdtemp()) / 'groups'}",
            local_rank=0,
            backend=_GLOO,
        )
        parallel_state.initialize_model_parallel()
