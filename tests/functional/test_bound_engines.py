"""An engine serves one fine-tune after the other, with the tokens of engines of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families.make import make_family
from benchmarks.families.table import family_named
from benchmarks.fine_tunes import fine_tune
from gpupoold.scheduling import events as e
from gpupoold.wire import messages as m
from tests.conftest import ROOT
from tests.functional.daemon_tools import weight_bytes
from tests.functional.worker_peer import WorkerPeer, prompt

BASE, TUNED, OTHER = "base", "tuned", "other"
MAX_LEN = 256
NUM_PROMPTS, NUM_TOKENS = 2, 16


@pytest.fixture(scope="module")
def paths(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("family")
    base = tiny_models["tiny-llama"]
    tuned = fine_tune(base, folder / TUNED, 1)
    return {BASE: base, TUNED: tuned, OTHER: tiny_models["tiny-qwen3"]}


@pytest.fixture(scope="module")
def peer(paths: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device for two models, which are loaded once each."""
    made = WorkerPeer(int(2.5 * max(map(weight_bytes, paths.values()))))
    try:
        for name, path in paths.items():
            made.load(name, path, max_model_len=MAX_LEN)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone(peer: WorkerPeer) -> dict[tuple[str, int], list[int]]:
    """The answers of engines that no other model has had."""
    found = peer.answers_alone([BASE, TUNED], NUM_PROMPTS, NUM_TOKENS)
    assert found[BASE, 0] != found[TUNED, 0]
    return found


def unload(peer: WorkerPeer, name: str) -> bool:
    """Unload a model; return whether the engine is kept."""
    peer.channel.send(m.UnloadModel(name, keeps_engine=True))
    ended = peer.wait(m.ModelUnloaded)
    peer.shell.handle(e.ModelRemoved(name))
    assert ended.name == name
    return bool(ended.is_engine_kept)


def answers(peer: WorkerPeer, name: str) -> list[list[int]]:
    ids = [f"{name} {index} {len(peer.ended)}" for index in range(NUM_PROMPTS)]
    for index, request_id in enumerate(ids):
        peer.ask(name, request_id, prompt(index), max_tokens=NUM_TOKENS)
    peer.run_until_ended(*ids)
    return [peer.tokens[request_id] for request_id in ids]


def load(peer: WorkerPeer, name: str, path: Path, of: str) -> m.ModelLoaded:
    return peer.load(name, path, snapshot=peer.snapshots[of], max_model_len=MAX_LEN)


def test_requests_of_a_model_leave_nothing_to_the_next(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]], paths: dict[str, Path]
) -> None:
    """Requests of all kinds end in the middle of their answers, before each takeover."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="[a-f]{24}")
    grammar._backend = "xgrammar"
    kinds: dict[str, dict[str, Any]] = {
        "seeded": {"temperature": 1.0, "seed": 7},
        "cut": {"temperature": 0.8, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1, "repetition_penalty": 1.3},
        "bias": {"logit_bias": {400: 9.0, 401: 8.5, 402: -50.0}},
        "allowed": {"allowed_token_ids": list(range(300, 340))},
        "least": {"min_tokens": 20, "stop_token_ids": list(range(0, 2000, 2))},
        "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
        "grammar": {"structured_outputs": grammar},
        "plain": {},
    }

    def ask(model: str, purpose: str, kind: str, max_tokens: int) -> str:
        request_id = f"{purpose} {kind} {model}"
        peer.ask(model, request_id, prompt(1), max_tokens=max_tokens, **kinds[kind])
        return request_id

    def all_kinds(model: str) -> dict[str, list[int]]:
        found = {}
        for kind in kinds:
            request_id = ask(model, "alone", kind, 24)
            peer.run_until_ended(request_id)
            found[kind] = peer.tokens[request_id]
        return found

    expected = {model: all_kinds(model) for model in (BASE, TUNED)}
    assert len({tuple(tokens) for tokens in expected[BASE].values()}) >= len(kinds) - 1
    before = TUNED
    for number, of in enumerate((BASE, TUNED, TUNED, BASE)):
        ended = [ask(before, f"ended {number}", kind, 200) for kind in kinds]
        while not all(peer.tokens[request_id] for request_id in ended):
            peer.pump(1.0)
        peer.abort(before, *ended)
        assert unload(peer, before)
        name = f"{of} after {number}"
        assert load(peer, name, paths[of], of).engine_of == before
        assert all_kinds(name) == expected[of]
        before = name
    assert unload(peer, before)
    assert load(peer, TUNED, paths[TUNED], TUNED).engine_of == before


def test_models_of_a_family_take_turns_in_one_engine(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]], paths: dict[str, Path]
) -> None:
    """Their prompts are equal, so that KV of the former model would be found."""
    assert unload(peer, TUNED)
    before, names = TUNED, (BASE, TUNED, TUNED, BASE, TUNED)
    for number, of in enumerate(names):
        name = f"{of}-{number}"
        loaded = load(peer, name, paths[of], of)
        assert (loaded.engine_of, loaded.snapshot_problem) == (before, "")
        assert answers(peer, name) == [alone[of, index] for index in range(NUM_PROMPTS)]
        peer.call("check_integrity")
        assert unload(peer, name)
        before = name
    assert answers(peer, BASE) == [alone[BASE, index] for index in range(NUM_PROMPTS)]


def test_a_new_model_is_read_without_an_engine(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]], paths: dict[str, Path]
) -> None:
    """Its first self-check is that of an engine of its own; the snapshot serves both."""
    load(peer, TUNED, paths[TUNED], TUNED)
    assert unload(peer, TUNED)
    loaded = peer.load("read", paths[TUNED], max_model_len=MAX_LEN)
    assert (loaded.engine_of, loaded.snapshot_problem) == (TUNED, "")
    assert loaded.layout_digest == peer.snapshots[TUNED].layout_digest
    assert loaded.self_check == peer.snapshots[TUNED].self_check
    assert loaded.stages.read_s > 0
    assert answers(peer, "read") == [alone[TUNED, index] for index in range(NUM_PROMPTS)]
    peer.call("check_integrity")
    again = peer.load("again", paths[TUNED], snapshot=peer.snapshots["read"], max_model_len=MAX_LEN)
    assert (again.engine_of, again.snapshot_problem) == ("", "")
    assert answers(peer, "again") == [alone[TUNED, index] for index in range(NUM_PROMPTS)]
    for name in ("read", "again"):
        unload(peer, name)


def test_another_model_gets_an_engine_of_its_own(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]], paths: dict[str, Path]
) -> None:
    """Of another layout, with other options."""
    load(peer, TUNED, paths[TUNED], TUNED)
    assert unload(peer, OTHER)
    assert load(peer, "of-other-layout", paths[TUNED], TUNED).engine_of == ""
    assert unload(peer, "of-other-layout")
    loaded = peer.load("short", paths[TUNED], snapshot=peer.snapshots[TUNED], max_model_len=128)
    assert (loaded.engine_of, loaded.model.max_model_len) == ("", 128)
    assert answers(peer, "short") == [alone[TUNED, index] for index in range(NUM_PROMPTS)]
    peer.call("check_integrity")


def test_a_snapshot_that_answers_otherwise_is_not_served(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]], paths: dict[str, Path]
) -> None:
    """The self-check of the model's own first load decides."""
    assert unload(peer, "short")
    assert unload(peer, TUNED)
    wrong = peer.snapshots[BASE]._replace(self_check=peer.snapshots[TUNED].self_check)
    loaded = peer.load(TUNED, paths[TUNED], snapshot=wrong, max_model_len=MAX_LEN)
    assert "with its snapshot the model answers" in loaded.snapshot_problem
    assert answers(peer, TUNED) == [alone[TUNED, index] for index in range(NUM_PROMPTS)]
    peer.call("check_integrity")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("mistral-window", "granite4", "deepseek-v2", "qwen3-moe"),
        *("llama-gptq", "qwen2.5-vl", "bert"),
    ],
)
def test_mechanisms(name: str, tmp_path: Path) -> None:
    """The self-check compares the numbers of models that do not generate."""
    family, folder = family_named(name), ROOT / "build" / "families"
    folder.mkdir(parents=True, exist_ok=True)
    base = make_family(family, folder)
    paths = {BASE: base, TUNED: fine_tune(base, tmp_path / TUNED, 1)}
    options: dict[str, Any] = {"dtype": family.dtype, "max_model_len": MAX_LEN}
    peer = WorkerPeer(3 * weight_bytes(base) + (16 << 20))
    try:
        for model, path in paths.items():
            peer.load(model, path, **options)
        generating = paths if family.generates else {}
        alone = {model: answers(peer, model) for model in generating}
        assert not alone or alone[BASE] != alone[TUNED]
        assert unload(peer, TUNED)
        for number, model in enumerate((BASE, TUNED, BASE)):
            again = f"{model}-{number}"
            loaded = peer.load(again, paths[model], snapshot=peer.snapshots[model], **options)
            assert loaded.engine_of
            assert not loaded.snapshot_problem
            assert not alone or answers(peer, again) == alone[model]
            peer.call("check_integrity")
            assert unload(peer, again)
        assert not alone or answers(peer, BASE) == alone[BASE]
    finally:
        peer.close()
