"""Configurations of the tiny vision checkpoints, of transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, MAX_POSITION_EMBEDDINGS, PAD_ID

VOCAB_SIZE = 2112
HIDDEN_SIZE, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER, _LAYERS = 256, 4, 2, 64, 768, 3
_VISION_HIDDEN, _VISION_HEADS, _VISION_INNER, _VISION_LAYERS = 64, 2, 128, 2
GEMMA_IMAGE_SIZE, GEMMA_IMAGE_TOKENS = 112, 16

GEMMA4_PATCH_SIZE, GEMMA4_POOLING, GEMMA4_IMAGE_TOKENS = 16, 3, 70

QWEN_TOKENS = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "bos_token": "<bos>",
}
GEMMA4_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
}


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **more,
    }


def _qwen_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": _VISION_LAYERS,
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": _VISION_INNER,
        "num_heads": _VISION_HEADS,
        "out_hidden_size": HIDDEN_SIZE,
        **more,
    }


def _qwen_ids(token_id: Callable[[str], int]) -> dict[str, Any]:
    start, end, image, video = map(token_id, QWEN_TOKENS.values())
    return {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": False,
    }


def _rope(**more: Any) -> dict[str, Any]:
    section = [8, 12, 12]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **more}


def qwen2_5_config(token_id: Callable[[str], int]) -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=_rope()),
        vision_config=_qwen_vision(window_size=56, fullatt_block_indexes=[1]),
        **_qwen_ids(token_id),
    )


def qwen3_config(token_id: Callable[[str], int]) -> Any:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        text_config=_text(head_dim=_HEAD_DIM, rope_parameters=_rope(mrope_interleaved=True)),
        vision_config=_qwen_vision(num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        **_qwen_ids(token_id),
    )


def gemma_config(token_id: Callable[[str], int]) -> Any:
    from transformers import Gemma3Config

    start, end, soft, _ = map(token_id, GEMMA_TOKENS.values())
    text = _text(
        head_dim=_HEAD_DIM,
        query_pre_attn_scalar=_HEAD_DIM,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    vision = {
        "image_size": GEMMA_IMAGE_SIZE,
        "patch_size": 14,
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": _VISION_INNER,
        "num_hidden_layers": _VISION_LAYERS,
        "num_attention_heads": _VISION_HEADS,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=GEMMA_IMAGE_TOKENS,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=soft,
        tie_word_embeddings=False,
    )


def gemma4_config(token_id: Callable[[str], int]) -> Any:
    from transformers import Gemma4Config

    text = _text(
        head_dim=_HEAD_DIM,
        global_head_dim=2 * _HEAD_DIM,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
    )
    vision = {
        "patch_size": GEMMA4_PATCH_SIZE,
        "pooling_kernel_size": GEMMA4_POOLING,
        "default_output_length": GEMMA4_IMAGE_TOKENS,
        "position_embedding_size": GEMMA4_IMAGE_TOKENS * GEMMA4_POOLING,
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": _VISION_INNER,
        "num_hidden_layers": _VISION_LAYERS,
        "num_attention_heads": _VISION_HEADS,
        "num_key_value_heads": _VISION_HEADS,
        "head_dim": _VISION_HIDDEN // _VISION_HEADS,
    }
    tokens = {name: token_id(token) for name, token in GEMMA4_TOKENS.items()}
    return Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        boi_token_id=tokens["boi_token"],
        eoi_token_id=tokens["eoi_token"],
        image_token_id=tokens["image_token"],
        boa_token_id=tokens["boa_token"],
        eoa_token_index=tokens["eoa_token"],
        audio_token_id=tokens["audio_token"],
        video_token_id=tokens["video_token"],
        tie_word_embeddings=False,
    )
