"""Torch's default dtype, which vLLM changes for the whole process while a model is loaded."""

from __future__ import annotations

from typing import Any

import torch

from gpupoold.worker.turns.loop import TurnLoop


def set_default_dtype(loop: TurnLoop, dtype: str) -> dict[str, Any]:
    """Set the default between two steps; return the former."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    return {"former": str(former).removeprefix("torch.")}
