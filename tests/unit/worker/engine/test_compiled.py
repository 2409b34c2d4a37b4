"""What torch's compiler keeps of a model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
wrapper = pytest.importorskip("vllm.compilation.wrapper", reason="the engine is not installed")

from gpupoold.worker.engine.vllm_process import forget_compiled  # noqa: E402


class Compiled(wrapper.TorchCompileWithNoGuardsWrapper, torch.nn.Module):  # type: ignore[misc, name-defined]
    """A module that has registered its hook as vLLM's do, without the rest of a compilation."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        register: Any = torch._dynamo.convert_frame.register_bytecode_hook
        self._bytecode_hook_handle = register(self.bytecode_hook)

    def forward(self) -> None:
        """Nothing."""


def test_a_model_whose_engine_has_gone_is_gone() -> None:
    model = torch.nn.Sequential(Compiled(), torch.nn.Linear(2, 2))
    module = weakref.ref(model[0])
    forget_compiled(model)
    del model
    gc.collect()
    assert module() is None
