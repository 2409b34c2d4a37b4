"""Options of engines that the user has not set."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from gpupoold.worker.engine.configuration import _cuda_defaults

LARGE = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]


@pytest.mark.parametrize(
    ("given", "num_sequences", "captured"),
    [
        ({}, 256, LARGE),
        ({"max_num_seqs": 64}, 64, LARGE[:9]),
        ({"max_num_seqs": 60}, 60, [*LARGE[:8], 60]),
        ({"max_num_seqs": 1024}, 1024, [*LARGE, 320, 384, 448, 512]),
        ({"max_cudagraph_capture_size": 512}, 256, None),
        ({"max_num_seqs": 32, "compilation_config": {"mode": 0}}, 32, None),
        ({"speculative_config": {"method": "ngram"}}, 256, None),
    ],
)
def test_batches_of_engines_that_share_a_gpu(
    given: dict[str, Any], num_sequences: int, captured: list[int] | None
) -> None:
    expected: dict[str, Any] = {"max_num_seqs": num_sequences}
    if captured is not None:
        expected["cudagraph_capture_sizes"] = captured
    assert _cuda_defaults(given, 28 << 30) == expected


@pytest.mark.parametrize(
    ("page_gib", "given", "expected"),
    [
        (20.0, {}, {"max_num_seqs": 64, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}),
        (5.5, {}, {"max_num_seqs": 16, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}),
        (0.1, {}, {"max_num_seqs": 16, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}),
        (
            20.0,
            {"max_num_seqs": 20},
            {"max_num_seqs": 20, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 20]},
        ),
        (20.0, {"enforce_eager": True}, {"max_num_seqs": 64}),
    ],
)
def test_batches_of_small_gpus_follow_from_their_memory(
    page_gib: float, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert _cuda_defaults(given, int(page_gib * 2**30)) == expected
