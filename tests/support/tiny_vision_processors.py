"""The files of the image processors of the tiny vision checkpoints."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.tiny_vision_configs import (
    GEMMA4_IMAGE_TOKENS,
    GEMMA4_PATCH_SIZE,
    GEMMA4_POOLING,
    GEMMA_IMAGE_SIZE,
    GEMMA_IMAGE_TOKENS,
)

_MIN_IMAGE_TOKENS, _MAX_IMAGE_TOKENS = 4, 64


def _write_qwen_processor(folder: Path, patch_size: int, processor: str, video: str) -> None:
    pixels_per_token = (2 * patch_size) ** 2
    limits = (_MIN_IMAGE_TOKENS * pixels_per_token, _MAX_IMAGE_TOKENS * pixels_per_token)
    size = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
    patches = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": processor}
    _write(folder / "preprocessor_config.json", patches | image)
    _write(
        folder / "video_preprocessor_config.json",
        patches | {"video_processor_type": video, "processor_class": processor},
    )


write_qwen2_5_processor = partial(
    _write_qwen_processor,
    patch_size=14,
    processor="Qwen2_5_VLProcessor",
    video="Qwen2VLVideoProcessor",
)
write_qwen3_processor = partial(
    _write_qwen_processor,
    patch_size=16,
    processor="Qwen3VLProcessor",
    video="Qwen3VLVideoProcessor",
)


def write_gemma_processor(folder: Path) -> None:
    size = {"height": GEMMA_IMAGE_SIZE, "width": GEMMA_IMAGE_SIZE}
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": GEMMA_IMAGE_TOKENS,
            "size": size,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    )
    content = {"image_seq_length": GEMMA_IMAGE_TOKENS, "processor_class": "Gemma3Processor"}
    _write(folder / "processor_config.json", content)


def write_gemma4_processor(folder: Path) -> None:
    """Write the files of a Gemma 4; its processor requires parts for audio and video."""
    patches = {
        "patch_size": GEMMA4_PATCH_SIZE,
        "pooling_kernel_size": GEMMA4_POOLING,
        "max_soft_tokens": GEMMA4_IMAGE_TOKENS,
    }
    _write(
        folder / "processor_config.json",
        {
            "processor_class": "Gemma4Processor",
            "image_seq_length": GEMMA4_IMAGE_TOKENS,
            "image_processor": patches | {"image_processor_type": "Gemma4ImageProcessor"},
            "video_processor": patches | {"video_processor_type": "Gemma4VideoProcessor"},
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
    )


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
