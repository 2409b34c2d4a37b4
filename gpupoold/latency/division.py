"""Whether the GPUs of a group can share a model's dimensions equally. Pure.

The rules are those of vLLM's tensor parallelism: each GPU computes an equal part of the attention
heads, of the feed-forward network and of the vocabulary. KV heads are copied if there are fewer
heads than GPUs.
"""

from __future__ import annotations

import re

MAX_GROUP_GPUS = 8
_GROUP_NAME = re.compile(r"(\d+) x (.+)")
# vLLM pads the vocabulary to a multiple of this number.
_VOCAB_MULTIPLE = 64


def why_undivided(
    degree: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    width: int | None = None,
    vocab_size: int | None = None,
) -> str:
    """Return why ``degree`` GPUs cannot share a model equally; empty if they can.

    ``width`` is that of the feed-forward network, or of an expert. None for what is unknown.
    """
    if num_heads is not None and num_heads % degree:
        return f"{num_heads} attention heads are not divisible by {degree}"
    if num_kv_heads is not None and num_kv_heads % degree and degree % num_kv_heads:
        return f"{num_kv_heads} KV heads neither divide {degree} nor are divisible by {degree}"
    if width is not None and width % degree:
        return f"the feed-forward width of {width} is not divisible by {degree}"
    if vocab_size is not None:
        padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if padded % degree:
            return f"the padded vocabulary of {padded} is not divisible by {degree}"
    return ""


def group_name(num_gpus: int, gpu: str) -> str:
    """Return the name of a kind of device: the GPU's, behind the number of GPUs of a group."""
    return f"{num_gpus} x {gpu}" if num_gpus > 1 else gpu


def parse_group_name(name: str) -> tuple[int, str]:
    """Return the number of GPUs and the GPU's name of a kind of device."""
    found = _GROUP_NAME.fullmatch(name)
    return (int(found[1]), found[2]) if found else (1, name)


def held_kv_heads(num_kv_heads: int, degree: int) -> int:
    """Return the KV heads on all GPUs together: fewer heads than GPUs are copied."""
    return max(num_kv_heads, degree)
