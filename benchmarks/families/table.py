"""The table of model families, each with a tiny configuration."""

from __future__ import annotations

from typing import Any

from benchmarks.families.family import (
    EXPERTS,
    GPT2,
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_HEADS,
    SLIDING_AND_FULL,
    SLIDING_WINDOW,
    Family,
    text_config,
)
from benchmarks.families.made import MADE_FAMILIES
from benchmarks.families.transformers_backend import TRANSFORMERS_BACKEND
from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, MAX_POSITION_EMBEDDINGS, PAD_ID, VOCAB_SIZE
from gpupoold.errors import UsageError

_MLA: dict[str, Any] = {
    "num_key_value_heads": NUM_HEADS,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    **EXPERTS,
}
_SHORT_CONVOLUTIONS: dict[str, Any] = {
    "head_dim": None,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
_MAMBA2: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES: tuple[Family, ...] = (
    Family("llama", "Llama 3", "llama", "dense", text_config()),
    Family("qwen2", "Qwen 2 and 2.5", "qwen2", "dense", text_config(head_dim=None)),
    Family("qwen3", "Qwen 3", "qwen3", "dense", text_config(), template="Qwen-Qwen3-0.6B"),
    Family("mixtral", "Mixtral", "mixtral", "experts", text_config(num_local_experts=4)),
    Family(
        "mistral",
        "Mistral",
        "mistral",
        "dense",
        text_config(sliding_window=None),
        template="mistralai-Mistral-Nemo-Instruct-2407",
    ),
    Family(
        "mistral-window",
        "Mistral, sliding window",
        "mistral",
        "sliding window",
        text_config(sliding_window=SLIDING_WINDOW),
        template="mistralai-Mistral-Nemo-Instruct-2407",
    ),
    Family(
        "mistral-small-3",
        "Mistral Small 3",
        "mistral",
        "dense",
        text_config(
            sliding_window=None,
            head_dim=64,
            rope_parameters={"rope_type": "default", "rope_theta": 1e8},
        ),
        template="Mistral-Small-3.2-24B-Instruct-2506",
    ),
    Family(
        "phi3",
        "Phi-3",
        "phi3",
        "dense",
        text_config(head_dim=None, sliding_window=None),
        template="microsoft-Phi-3.5-mini-instruct",
    ),
    Family(
        "phi4",
        "Phi-4",
        "phi3",
        "dense",
        text_config(
            head_dim=None,
            sliding_window=None,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 250000.0,
                "partial_rotary_factor": 0.75,
            },
            partial_rotary_factor=0.75,
        ),
    ),
    Family(
        "gemma2",
        "Gemma 2",
        "gemma2",
        "sliding window",
        text_config(
            tie_word_embeddings=True,
            sliding_window=SLIDING_WINDOW,
            layer_types=SLIDING_AND_FULL,
            query_pre_attn_scalar=HEAD_DIM,
        ),
    ),
    Family(
        "gemma3",
        "Gemma 3 (text)",
        "gemma3_text",
        "sliding window",
        text_config(
            tie_word_embeddings=True,
            sliding_window=SLIDING_WINDOW,
            layer_types=SLIDING_AND_FULL,
            query_pre_attn_scalar=HEAD_DIM,
        ),
    ),
    Family("glm4", "GLM-4", "glm4", "dense", text_config()),
    Family(
        "glm4-moe",
        "GLM-4.5 MoE",
        "glm4_moe",
        "experts",
        text_config(
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            use_qk_norm=True,
            **EXPERTS,
        ),
        template="GLM-4.6",
    ),
    Family(
        "granite",
        "Granite",
        "granite",
        "dense",
        text_config(head_dim=None),
        template="ibm-granite-granite-3.3-2B-Instruct",
    ),
    Family(
        "granite4",
        "Granite 4 (hybrid Mamba 2)",
        "granitemoehybrid",
        "hybrid",
        text_config(
            head_dim=None,
            num_hidden_layers=4,
            layer_types=["mamba", "mamba", "attention", "mamba"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=128,
            intermediate_size=64,
            mamba_expand=2,
            **_MAMBA2,
        ),
        template="ibm-granite-granite-4.0",
    ),
    Family(
        "qwen2-moe",
        "Qwen2-MoE",
        "qwen2_moe",
        "experts",
        text_config(head_dim=None, num_experts=4, shared_expert_intermediate_size=128, **EXPERTS),
    ),
    Family(
        "qwen3-moe",
        "Qwen3-MoE",
        "qwen3_moe",
        "experts",
        text_config(num_experts=4, **EXPERTS),
        template="Qwen-Qwen3-0.6B",
    ),
    Family(
        "mamba2",
        "Mamba 2",
        "mamba2",
        "state",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    Family(
        "opt",
        "OPT",
        "opt",
        "dense",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "ffn_dim": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": NUM_HEADS,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": HIDDEN_SIZE,
            "tie_word_embeddings": True,
            "bos_token_id": EOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        },
    ),
    Family("gpt2", "GPT-2", "gpt2", "dense", GPT2),
    Family("stablelm", "StableLM", "stablelm", "dense", text_config(head_dim=None)),
    Family(
        "cohere",
        "Cohere",
        "cohere",
        "dense",
        text_config(head_dim=None, tie_word_embeddings=True, use_qk_norm=True),
    ),
    Family(
        "gpt-oss",
        "gpt-oss (bfloat16 form)",
        "gpt_oss",
        "attention sinks",
        text_config(
            sliding_window=SLIDING_WINDOW,
            layer_types=SLIDING_AND_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=64,
            initial_context_length=MAX_POSITION_EMBEDDINGS,
        ),
        template="openai-gpt-oss-120b",
        weight_growth=14.0,
    ),
    Family(
        "deepseek-v2",
        "DeepSeek-V2",
        "deepseek_v2",
        "MLA",
        text_config(head_dim=None, topk_method="group_limited_greedy", **_MLA),
    ),
    Family(
        "deepseek-v3",
        "DeepSeek-V3",
        "deepseek_v3",
        "MLA",
        text_config(head_dim=None, topk_method="noaux_tc", **_MLA),
        template="deepseek-ai-DeepSeek-V3.1",
    ),
    Family(
        "qwen3-next",
        "Qwen3-Next (Gated DeltaNet)",
        "qwen3_next",
        "hybrid",
        text_config(num_experts=4, shared_expert_intermediate_size=128, **EXPERTS, **_DELTA_NET),
        dtype="bfloat16",
    ),
    Family(
        "qwen3.5",
        "Qwen3.5 (Gated DeltaNet)",
        "qwen3_5_text",
        "hybrid",
        text_config(**_DELTA_NET),
        dtype="bfloat16",
        template="Qwen3.5-4B",
    ),
    Family(
        "falcon-h1",
        "Falcon-H1 (hybrid Mamba 2)",
        "falcon_h1",
        "hybrid",
        text_config(mamba_d_ssm=256, mamba_expand=2, **_MAMBA2),
    ),
    Family(
        "lfm2",
        "LFM2 (short convolutions)",
        "lfm2",
        "hybrid",
        text_config(
            conv_dim=HIDDEN_SIZE,
            conv_dim_out=HIDDEN_SIZE,
            block_dim=HIDDEN_SIZE,
            block_auto_adjust_ff_dim=False,
            **_SHORT_CONVOLUTIONS,
        ),
    ),
    Family(
        "lfm2-moe",
        "LFM2-MoE",
        "lfm2_moe",
        "hybrid",
        text_config(num_dense_layers=1, num_experts=4, **EXPERTS, **_SHORT_CONVOLUTIONS),
    ),
    Family(
        "llama4",
        "Llama 4 (text)",
        "llama4_text",
        "experts",
        text_config(
            intermediate_size=128,
            intermediate_size_mlp=256,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            num_hidden_layers=4,
            attention_chunk_size=SLIDING_WINDOW,
        ),
    ),
    Family(
        "gemma4",
        "Gemma 4 (text)",
        "gemma4_text",
        "sliding window",
        text_config(
            tie_word_embeddings=True,
            sliding_window=SLIDING_WINDOW,
            layer_types=SLIDING_AND_FULL,
            num_hidden_layers=2,
            global_head_dim=64,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=0,
        ),
        template="google-gemma-4-31B-it",
    ),
    *TRANSFORMERS_BACKEND,
    *MADE_FAMILIES,
)


def family_named(name: str) -> Family:
    """Return a family of the table.

    Raises:
        UsageError: the table has no such family.
    """
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        names = ", ".join(family.name for family in FAMILIES)
        raise UsageError(f"unknown family {name!r}", f"use one of {names}")
    return found
