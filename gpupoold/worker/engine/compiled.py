"""What torch's compiler keeps of a model after its engine has gone."""

from __future__ import annotations

from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper


def forget_compiled(model: nn.Module) -> None:
    """Take back the hooks that vLLM registers with the compiler, one for each compiled module.

    They are listed for the whole process and hold their module, and with it its code and the
    CUDA graphs in there; vLLM itself leaves them.
    """
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()
