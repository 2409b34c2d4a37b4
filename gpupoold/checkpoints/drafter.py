"""The checkpoint of a drafter, which the options of speculative decoding name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gpupoold.checkpoints.tensor_file import elements_by_dtype, read_tensors
from gpupoold.errors import Refused


def drafter_elements(engine: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of elements by dtype of the drafter in a local folder.

    ``engine`` has the model's engine options. Empty without a drafter of its own, as for n-grams,
    and for drafters that are part of the model's checkpoint.

    Raises:
        Refused: a weight file of the drafter is damaged, or the folder has no weights.
    """
    folder = drafter_folder(engine)
    if folder is None:
        return {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refused(
            f"{folder}: has no weights (*.safetensors) of a drafter",
            "give the drafter's folder, or n-gram drafts",
        )
    return elements_by_dtype(tensor for file in files for tensor in read_tensors(file))


def drafter_folder(engine: Mapping[str, str]) -> Path | None:
    """Return the folder in the options of speculative decoding; None without a local folder."""
    name = engine.get("speculative_config.model") or engine.get("spec_model")
    try:
        config = json.loads(engine.get("speculative_config", "{}"))
    except (ValueError, RecursionError):  # vLLM reports the error
        config = None
    if isinstance(config, dict) and isinstance(config.get("model"), str):
        name = config["model"]
    folder = Path(name) if name else None
    return folder if folder is not None and folder.is_dir() else None
