"""Families that vLLM runs through its Transformers backend: modules of Transformers, rewritten.

Some are routed there by vLLM's registry, the others (from Ministral on) because vLLM does not know
the architecture.
"""

from __future__ import annotations

from typing import Any

from benchmarks.families.family import (
    EXPERTS,
    GPT2,
    HEAD_DIM,
    SLIDING_AND_FULL,
    SLIDING_WINDOW,
    Family,
    text_config,
)
from gpupoold.checkpoints.tiny_tokenizer import EOS_ID

_WINDOWS: dict[str, Any] = {"sliding_window": SLIDING_WINDOW, "layer_types": SLIDING_AND_FULL}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def _family(name: str, title: str, model_type: str, mechanism: str, **changes: Any) -> Family:
    return Family(name, title, model_type, mechanism, text_config(**changes))


TRANSFORMERS_BACKEND: tuple[Family, ...] = (
    _family("olmo2", "OLMo 2", "olmo2", "dense", head_dim=None),
    Family(
        "smollm3",
        "SmolLM3",
        "smollm3",
        "dense",
        text_config(head_dim=None, no_rope_layers=[1, 0]),
        template="HuggingFaceTB-SmolLM3-3B",
    ),
    _family(
        "gpt-neox",
        "GPT-NeoX (Pythia)",
        "gpt_neox",
        "dense",
        head_dim=None,
        num_key_value_heads=None,
        rope_parameters={**_ROPE, "partial_rotary_factor": 0.25},
    ),
    Family("gpt-bigcode", "GPT BigCode (StarCoder)", "gpt_bigcode", "dense", GPT2),
    _family("starcoder2", "StarCoder 2", "starcoder2", "dense", head_dim=None),
    _family("phi", "Phi-2", "phi", "dense", head_dim=None),
    _family("glm", "GLM", "glm", "dense"),
    _family("olmo", "OLMo", "olmo", "dense", head_dim=None),
    _family("olmo3", "OLMo 3", "olmo3", "sliding window", head_dim=None, **_WINDOWS),
    _family(
        "flex-olmo",
        "FlexOlmo",
        "flex_olmo",
        "experts",
        head_dim=None,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    _family("seed-oss", "Seed-OSS", "seed_oss", "dense"),
    _family("arcee", "Arcee (AFM)", "arcee", "dense"),
    _family("cwm", "CWM", "cwm", "sliding window", bos_token_id=EOS_ID, **_WINDOWS),
    _family(
        "vaultgemma",
        "VaultGemma",
        "vaultgemma",
        "sliding window",
        tie_word_embeddings=True,
        query_pre_attn_scalar=HEAD_DIM,
        **_WINDOWS,
    ),
    _family("jais2", "Jais 2", "jais2", "dense"),
    _family("hunyuan-dense", "Hunyuan (dense)", "hunyuan_v1_dense", "dense"),
    _family("hunyuan-moe", "Hunyuan-MoE", "hunyuan_v1_moe", "experts", num_experts=4, moe_topk=2),
    _family(
        "mellum",
        "Mellum 2",
        "mellum",
        "experts",
        num_local_experts=4,
        rope_parameters=dict.fromkeys(SLIDING_AND_FULL, _ROPE),
        **EXPERTS,
        **_WINDOWS,
    ),
    _family("ministral", "Ministral", "ministral", "sliding window", **_WINDOWS),
    _family("helium", "Helium", "helium", "dense"),
    _family("nanochat", "NanoChat", "nanochat", "dense"),
    _family(
        "persimmon", "Persimmon", "persimmon", "dense", head_dim=None, num_key_value_heads=None
    ),
    _family(
        "dots1",
        "dots.llm1",
        "dots1",
        "experts",
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        **EXPERTS,
    ),
    _family("phimoe", "Phi-3.5-MoE", "phimoe", "experts", head_dim=None, num_local_experts=4),
)
