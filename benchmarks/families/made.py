"""Families whose tiny checkpoints other makers write: vision, pooling, quantized, with drafts."""

from __future__ import annotations

from typing import Any, Literal

from benchmarks.families.family import Family


def _quantized(
    maker: str, title: str, dtype: Literal["float32", "float16", "bfloat16"] = "float32"
) -> Family:
    """Return a Llama in a format of ``scripts.tiny_quantized``, in the format's dtype on a CPU."""
    return Family(f"llama-{maker}", title, "llama", "quantized", dtype=dtype, maker=maker)


def _with_drafts(method: str, title: str, calm: str, growth: float = 2.0, **drafts: Any) -> Family:
    """Return a model of ``scripts.tiny_drafter`` with drafts of three tokens."""
    model_type = "llama" if "llama" in calm else "qwen2"
    return Family(
        f"drafts-{method}",
        title,
        model_type,
        "drafts",
        maker=calm,
        weight_growth=growth,
        drafts={"method": method, "num_speculative_tokens": 3, **drafts},
    )


MADE_FAMILIES: tuple[Family, ...] = (
    Family("gemma3-vision", "Gemma 3 (vision)", "gemma3", "vision", maker="gemma3", task="vision"),
    Family(
        "qwen2.5-vl",
        "Qwen2.5-VL (vision)",
        "qwen2_5_vl",
        "vision",
        maker="qwen2_5_vl",
        task="vision",
    ),
    Family(
        "qwen3-vl",
        "Qwen3-VL (vision)",
        "qwen3_vl",
        "vision",
        maker="qwen3_vl",
        task="vision",
        weight_growth=2.0,  # on groups
    ),
    Family(
        "gemma4-vision",
        "Gemma 4 (vision)",
        "gemma4",
        "vision",
        maker="gemma4",
        task="vision",
        template="google-gemma-4-31B-it",
    ),
    Family("bert", "BERT (embeddings)", "bert", "pooling", maker="bert-embed", task="embed"),
    Family(
        "modernbert",
        "ModernBERT (embeddings)",
        "modernbert",
        "pooling",
        maker="modernbert-embed",
        task="embed",
    ),
    Family(
        "qwen3-embedding", "Qwen3-Embedding", "qwen3", "pooling", maker="qwen3-embed", task="embed"
    ),
    Family(
        "cross-encoder",
        "Cross-encoder (BERT)",
        "bert",
        "pooling",
        maker="bert-rerank",
        task="classify",
    ),
    _quantized("gptq", "Llama, GPTQ", "float16"),
    _quantized("awq", "Llama, AWQ", "float16"),
    _quantized("w4a16", "Llama, compressed-tensors int4 (W4A16)", "bfloat16"),
    _quantized("w8a8", "Llama, compressed-tensors int8 (W8A8)"),
    _quantized("fp8-channel", "Llama, compressed-tensors fp8 per channel"),
    _quantized("fp8", "Llama, fp8", "bfloat16"),
    _with_drafts(
        "ngram",
        "Llama, n-gram drafts",
        "tiny-llama-calm",
        1.0,
        prompt_lookup_max=3,
        prompt_lookup_min=2,
    ),
    _with_drafts("eagle", "Llama, EAGLE", "tiny-llama-calm", model="-eagle"),
    _with_drafts("eagle3", "Qwen 2, EAGLE-3", "tiny-qwen2-calm", model="-eagle3"),
    _with_drafts("mtp", "MiMo, MTP", "tiny-mimo-calm"),
    _with_drafts("draft_model", "Llama, draft model", "tiny-llama-calm", model=""),
)
