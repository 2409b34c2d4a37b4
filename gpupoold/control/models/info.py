"""Registry rows as the admin API shows models."""

from __future__ import annotations

from dataclasses import asdict, replace

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import FoundInfo, ModelInfo
from gpupoold.checkpoints.parsers import FoundParsers
from gpupoold.control.models.profiles import latencies_of, latency_on
from gpupoold.domain import ModelState
from gpupoold.wire.messages import LoadedModel


def model_info(
    row: ModelRow, state: ModelState | None = None, loaded: LoadedModel | None = None
) -> ModelInfo:
    """Return a registry row as a body of the admin API; ``state`` replaces the stored state.

    ``loaded`` has the facts of the engines, None before the first load.
    """
    spec = row.spec
    described = vars(spec) | {"max_model_len": row.loaded_max_model_len or spec.max_model_len}
    targets = asdict(described.pop("targets"))
    return ModelInfo(
        **described,
        **targets,
        state=(state or row.state).value,
        error=row.error,
        architecture=row.architecture,
        weight_bytes=row.weight_bytes,
        kv_bytes_per_token=row.kv_bytes_per_token,
        created_at=row.created_at,
        latency=latency_on(row.profiles),
        latencies=tuple(latencies_of(row.profiles)),
        tasks=() if loaded is None else loaded.supported_tasks,
    )


def with_parsers(info: ModelInfo, found: FoundParsers) -> ModelInfo:
    """Return the body with a model's parsers and chat template."""
    return replace(
        info,
        tool_parser=FoundInfo(**asdict(found.tool)),
        reasoning_parser=FoundInfo(**asdict(found.reasoning)),
        chat_template=FoundInfo(**asdict(found.chat_template)),
    )
