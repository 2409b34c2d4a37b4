"""Whether a group of GPUs can divide a checkpoint, from ``config.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpupoold.latency.shape import why_undivided

_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")
_EXPERT_WIDTHS = ("moe_intermediate_size",)


def why_checkpoint_undivided(config: Mapping[str, Any], degree: int) -> str:
    """Return why ``degree`` GPUs cannot divide the model of a ``config.json``; empty if they can.

    Dimensions under unknown names count as divisible: vLLM's own classes decide in the end.
    """
    nested = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((one for one in nested if isinstance(one, dict)), config)
    is_latent = bool(text.get("kv_lora_rank"))  # each GPU has the complete latent KV
    return why_undivided(
        degree,
        num_heads=_whole(text, _HEADS),
        num_kv_heads=None if is_latent else _whole(text, _KV_HEADS),
        width=_whole(text, _EXPERT_WIDTHS) or _whole(text, _WIDTHS),
        vocab_size=_whole(text, ("vocab_size",)),
    )


def _whole(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
