"""Models as they are loaded by default: by torch's compiler, with graphs for parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.durations import GraphSizes
from tests.gpu.rig import (
    IS_GPU,
    LLAMA,
    Box,
    Checkpoints,
    engine_environment,
    integrity,
    limit_s,
    same_tokens,
)

pytestmark = [pytest.mark.gpu(emulated=True), pytest.mark.timeout(limit_s(150))]

NUM_TOKENS = 200


@pytest.fixture
def box(checkpoints: Checkpoints, tmp_path: Path) -> Iterator[Box]:
    made = Box(checkpoints, tmp_path / "compiled.log", 1.9, engine_environment(is_compiled=True))
    yield made
    made.close()


def test_a_compiled_model_goes_on_after_its_memory_was_taken_away(box: Box) -> None:
    box.load(LLAMA)
    expected = box.alone(LLAMA, 1, NUM_TOKENS)
    if IS_GPU:  # batches of 2 and 8 get their graphs while nothing runs
        while (graphs := box.peer.graphs.get(LLAMA, GraphSizes(num_left=2))).num_left:
            box.peer.pump(1.0)
        assert (graphs.num_first, graphs.num_late) == (3, 2)
        assert graphs.late_s > 0
        asked = [box.ask(LLAMA, seed, NUM_TOKENS) for seed in range(8)]
        assert {len(box.answer(one)) for one in asked} == {NUM_TOKENS}
        same_tokens(box.answer(box.ask(LLAMA, 1, NUM_TOKENS)), expected, LLAMA)
    request_id = box.ask(LLAMA, 1, NUM_TOKENS)
    for num_tokens in (20, 40, 60):
        box.wait_for_tokens(request_id, num_tokens)
        box.peer.call("page_out", model=LLAMA)
    same_tokens(box.answer(request_id), expected, LLAMA)
    integrity(box.peer)
