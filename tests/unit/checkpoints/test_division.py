"""Dimensions of several families, as their ``config.json`` spells them."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.checkpoints.survey import why_checkpoint_undivided

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        (HEADS, [2, 4]),
        ({"text_config": HEADS, "num_attention_heads": 7}, [2, 4]),
        ({"n_head": 12, "n_embd": 768}, [2, 3, 4, 6]),
        ({"num_attention_heads": 71, "num_kv_heads": 1}, []),
        (HEADS | {"moe_intermediate_size": 6}, [2]),
        (HEADS | {"kv_lora_rank": 512, "num_key_value_heads": 5}, [2, 3, 4, 6]),
        ({"num_attention_heads": [4, 8], "n_layers": 4, "intermediate_size": True}, [*range(2, 9)]),
        ({}, [*range(2, 9)]),
    ],
)
def test_degrees_that_divide(config: dict[str, Any], degrees: list[int]) -> None:
    found = [one for one in range(2, 9) if not why_checkpoint_undivided(config, one)]
    assert found == degrees
    assert not why_checkpoint_undivided(config, 1)
