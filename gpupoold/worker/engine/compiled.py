"""State of torch's compiler that outlives a model's engine."""

from __future__ import annotations

from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper


def forget_compiled(model: nn.Module) -> None:
    """Remove the hooks that vLLM registers with the compiler for each compiled module.

    The hooks are in a list of the process, which keeps the module alive with its code and CUDA
    graphs. vLLM does not remove the hooks.
    """
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()
