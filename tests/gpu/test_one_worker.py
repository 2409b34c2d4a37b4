"""One real worker: models with CUDA graphs, switched between tokens on paged memory.

The device holds the weights of two of the three models, and the KV of some requests. A model
has one request at a time, so that every engine computes the same batches as when it is alone;
what is then different is the pool's doing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.conftest import FAILED
from tests.gpu.rig import (
    IS_GPU,
    LLAMA,
    LONG,
    MODELS,
    QWEN2,
    QWEN3,
    SCALE,
    Box,
    Checkpoints,
    Restarting,
    engine_environment,
    integrity,
    limit_s,
    same_tokens,
)

pytestmark = [pytest.mark.gpu(emulated=True), pytest.mark.timeout(limit_s(90))]

NUM_TOKENS = 64
NUM_LONG = 200
MODES = ["resident", "prefetched", "host_cached"]
_MIB = 1 << 20


@pytest.fixture(scope="module")
def boxes(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Restarting]:
    log_path = tmp_path_factory.mktemp("worker") / "worker.log"
    made = Restarting(lambda: Box(checkpoints, log_path, SCALE.num_models, engine_environment()))
    yield made
    made.close()


@pytest.fixture
def box(boxes: Restarting, request: pytest.FixtureRequest) -> Iterator[Box]:
    """The worker; a test that failed leaves a new one to the next."""
    yield boxes.get()
    if request.node.stash.get(FAILED, False):
        boxes.drop()


@pytest.mark.timeout(limit_s(150))  # with the start of the process, and the first kernels of all
def test_a_model_is_loaded_and_answers(box: Box) -> None:
    box.load(LLAMA)
    first = box.alone(LLAMA, 1, NUM_TOKENS)
    assert len(first) == NUM_TOKENS
    assert len(set(first)) > NUM_TOKENS // 8, f"not a text: {first}"
    assert box.answer(box.ask(LLAMA, 1, NUM_TOKENS)) == first
    accounts = integrity(box.peer)
    assert accounts["owned_pages"] + accounts["free_pages"] == accounts["pages"]
    assert ("unaccounted_bytes" in accounts) == IS_GPU


def test_top_p_and_top_k_are_sampled(box: Box) -> None:
    """As checkpoints ask for in generation_config.json; the self-check is greedy. The kernel of an
    installed FlashInfer would be compiled at the first of these requests."""
    box.load(LLAMA)
    for chosen in ({"top_p": 0.8}, {"top_k": 20}, {"top_p": 0.8, "top_k": 20}):
        request_id = box.ask(LLAMA, 1, NUM_TOKENS, temperature=1.0, **chosen)
        assert len(box.answer(request_id)) == NUM_TOKENS


def test_weights_and_kv_are_the_same_bytes_after_a_pause(box: Box) -> None:
    box.load(LLAMA)
    expected = box.alone(LLAMA, 2, 200)
    request_id = box.ask(LLAMA, 2, 200)
    box.wait_for_tokens(request_id, 20)
    # Calls are answered between two steps; nothing steps the model in between.
    before, moved, after = box.peer.call_many(
        [
            ("checksum", {"model": LLAMA}),
            ("page_out", {"model": LLAMA}),
            ("checksum", {"model": LLAMA}),
        ]
    )
    assert before["num_live_blocks"] > 0
    assert moved["kv_out_bytes"] > 0
    assert after == before
    assert box.answer(request_id) == expected


@pytest.mark.timeout(limit_s(150))
def test_three_architectures_answer_as_alone(box: Box) -> None:
    box.load(*MODELS)
    box.peer.switches.clear()
    for seed in range(2):
        box.one_of_each(seed, NUM_TOKENS)
    assert sum(switch.weight_bytes for switch in box.peer.switches) > SCALE.checkpoint_bytes // 2
    integrity(box.peer)


def test_two_models_stay_beside_each_other(box: Box) -> None:
    pair = (LLAMA, QWEN3)
    box.load(*pair)
    expected = {name: box.alone(name, 0, NUM_TOKENS) for name in pair}
    for name in pair:
        box.answer(box.ask(name, 0, 2))
    box.peer.switches.clear()
    asked = {name: box.ask(name, 0, NUM_TOKENS) for name in pair}
    for name, request_id in asked.items():
        same_tokens(box.answer(request_id), expected[name], name)
    assert sum(switch.weight_bytes for switch in box.peer.switches) == 0
    swap = box.peer.call("bench_switch", models=list(pair), rounds=2, modes=MODES, kv_bytes=0)
    moved = {mode: rows["without_kv"]["bytes"] for mode, rows in swap["modes"].items()}
    assert moved["resident"] == moved["prefetched"] == 0
    assert moved["host_cached"] >= swap["weight_bytes"]


def test_kv_goes_and_comes_while_others_run(box: Box) -> None:
    """There is room for the weights of both, and for the KV of neither: KV leaves, or a part of
    the other model's weights where these are cheaper to move."""
    pair = (LLAMA, QWEN2)
    box.load(*pair)
    for name in pair:
        box.alone(name, LONG, SCALE.long_tokens)
    box.peer.switches.clear()
    box.one_of_each(LONG, SCALE.long_tokens, pair)
    moved_bytes = [
        sum(getattr(switch, name) for switch in box.peer.switches)
        for name in ("weight_bytes", "kv_out_bytes", "kv_in_bytes")
    ]
    assert moved_bytes[0] + moved_bytes[2] > 0
    assert (moved_bytes[1] > 0) == (moved_bytes[2] > 0)
    if not IS_GPU:
        assert moved_bytes[1] > 0
    assert box.peer.status is not None
    assert box.peer.status.activity.num_recomputed == 0
    integrity(box.peer)


def test_kv_is_moved_beside_the_steps_of_another_model(box: Box) -> None:
    pair = [LLAMA, QWEN3]
    box.load(*pair)
    num_bytes = 16 * _MIB if IS_GPU else _MIB // 2
    moved = box.peer.call("bench_kv", models=pair, rounds=2, kv_bytes=num_bytes)
    assert moved["kv_swap"]["is_intact"] is True
    assert moved["kv_swap"]["bytes"] >= 2 * num_bytes
    assert moved["kv_overlap"]["steps_during"] > 0


@pytest.mark.timeout(limit_s(120))
def test_a_thousand_switches_lose_and_gain_nothing(box: Box) -> None:
    """All models are taken off the device again and again while they answer."""
    box.load(*MODELS)
    box.one_of_each(1, NUM_LONG)
    before, at_first = integrity(box.peer), box.peer.call("leftovers")
    box.peer.switches.clear()
    while sum(bool(switch.weight_bytes) for switch in box.peer.switches) < SCALE.num_switches:
        asked = {name: box.ask(name, 1, NUM_LONG) for name in MODELS}
        while not asked_ended(box, asked):
            for name in MODELS:
                box.peer.call("page_out", model=name)
            wait_for_a_token(box, asked)
        for name, request_id in asked.items():
            same_tokens(box.answer(request_id), box.alone(name, 1, NUM_LONG), name)
    after, at_last = integrity(box.peer), box.peer.call("leftovers")
    for left in (at_first, at_last):
        assert left["free_pages"] == left["pages"]
        assert left["kv_host_bytes"] == 0
    assert after.get("unaccounted_bytes", 0) - before.get("unaccounted_bytes", 0) < 64 * _MIB


def asked_ended(box: Box, asked: dict[str, str]) -> bool:
    return set(asked.values()) <= set(box.peer.ended)


def wait_for_a_token(box: Box, asked: dict[str, str]) -> None:
    def num_tokens() -> int:
        return sum(len(box.peer.tokens[request_id]) for request_id in asked.values())

    before = num_tokens()
    while num_tokens() == before and not asked_ended(box, asked):
        box.peer.pump(1.0)
