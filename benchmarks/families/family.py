"""A model family of the table, and the sizes of the tiny checkpoints.

Sizes are small, structure is kept: layer types alternate, windows are shorter than the prompts,
experts are routed, states and latent KV have the shapes of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, MAX_POSITION_EMBEDDINGS, PAD_ID, VOCAB_SIZE

HIDDEN_SIZE = 128
NUM_HEADS = 4
HEAD_DIM = 32
SLIDING_WINDOW = 64
EXPERT_WIDTH = 64
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 2 * HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
# The names that GPT-2 and its relatives have for the same sizes.
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": HIDDEN_SIZE,
    "n_inner": 2 * HIDDEN_SIZE,
    "n_layer": 2,
    "n_head": NUM_HEADS,
    "n_positions": 1024,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}

Task = Literal["generate", "vision", "embed", "classify"]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A family of models: ``config`` has arguments of its Transformers configuration class.

    ``mechanism`` names the part that a page or a test selects by. A family in another ``dtype``
    than float32 cannot compute in float32 in vLLM. vLLM's weights have at most ``weight_growth``
    times the bytes of the file. ``maker`` is the key of gpupool's maker of vision, pooling or
    quantized checkpoints, or the name of a calm model for ``drafts``: the options of vLLM's
    speculative decoding, where ``model`` is the end of the drafter's folder name after the model's.
    ``template`` is the file of a real chat template in ``tests/templates``.
    """

    name: str
    title: str
    model_type: str
    mechanism: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    task: Task = "generate"
    weight_growth: float = 1.0
    maker: str = ""
    template: str = ""
    drafts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """False for a pooling model."""
        return self.task in ("generate", "vision")

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request; the tiny encoders have 256 positions."""
        return 512 if self.generates else 256

    def speculative_config(self, path: Path) -> dict[str, Any]:
        """Return vLLM's options of drafts for the checkpoint ``path``, empty without drafts."""
        options = dict(self.drafts)
        if "model" in options:
            options["model"] = f"{path}{options['model']}"
        return options

    @property
    def architecture(self) -> str:
        """Name of the model class that generates text, from Transformers."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])


def text_config(**changes: Any) -> dict[str, Any]:
    """Return the common configuration with ``changes``; None removes a field."""
    merged = _COMMON | changes
    return {
        key: value
        for key, value in merged.items()
        if value is not None or key in ("bos_token_id", "sliding_window")
    }
