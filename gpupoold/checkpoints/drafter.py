"""The checkpoint of a drafter, which the options of speculative decoding name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gpupoold.checkpoints.tensor_file import elements_by_dtype, read_tensors
from gpupoold.errors import Refused


def drafter_elements(engine: Mapping[str, str], model: Path | None = None) -> dict[str, int]:
    """Return the numbers of elements by dtype of the drafter in a local folder.

    ``engine`` has the engine options of the model in folder ``model``. Empty without a drafter of
    its own, as for n-grams, and for a module for MTP in the model's checkpoint.

    Raises:
        Refused: a weight file of the drafter is damaged, or the folder has no weights.
    """
    method, folder = drafter_of(engine)
    if folder is None or (_is_mtp(method) and model and folder.resolve() == model.resolve()):
        return {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refused(
            f"{folder}: has no weights (*.safetensors) of a drafter",
            "give the drafter's folder, or n-gram drafts",
        )
    return elements_by_dtype(tensor for file in files for tensor in read_tensors(file))


def drafter_of(engine: Mapping[str, str]) -> tuple[str | None, Path | None]:
    """Return the method in the options of speculative decoding, and the drafter's local folder.

    Both are None if not given, the folder also for a name of another kind.
    """
    method = engine.get("speculative_config.method") or engine.get("spec_method")
    name = engine.get("speculative_config.model") or engine.get("spec_model")
    try:
        config = json.loads(engine.get("speculative_config", "{}"))
    except (ValueError, RecursionError):  # vLLM reports the error
        config = None
    if isinstance(config, dict):
        method = _text(config, "method") or method
        name = _text(config, "model") or name
    folder = Path(name) if name else None
    return method, folder if folder is not None and folder.is_dir() else None


def _text(config: dict[str, object], key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) else None


def _is_mtp(method: str | None) -> bool:
    """Return whether vLLM reads a module for MTP: ``mtp``, or a family's older name."""
    return method is not None and (method == "mtp" or method.endswith("_mtp"))
