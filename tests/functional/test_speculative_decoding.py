"""Drafts of any kind change no greedy token, whatever is switched meanwhile."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.functional.worker_peer import WorkerPeer

pytestmark = pytest.mark.slow

NUM_TOKENS = 140
NUM_PROMPTS = 3
PLAIN, NGRAM, EAGLE, EAGLE3, MTP, DRAFT = (
    "plain",
    "ngram",
    "eagle",
    "eagle3",
    "mtp",
    "draft_model",
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    NGRAM: ("tiny-llama-calm", {"prompt_lookup_max": 3, "prompt_lookup_min": 2}),
    EAGLE: ("tiny-llama-calm", {"model": "tiny-llama-calm-eagle"}),
    EAGLE3: ("tiny-qwen2-calm", {"model": "tiny-qwen2-calm-eagle3"}),
    MTP: ("tiny-mimo-calm", {}),
    DRAFT: ("tiny-llama-calm", {"model": "tiny-llama-calm"}),
}
"""Of each method the model, and more options; a drafter is in another folder beside it."""


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(7 + 40 * index)]


class Box:
    """A worker with a model that does without drafts, and the same model with drafts.

    The device has room for one of them and a half.
    """

    def __init__(self, folder: Path, method: str) -> None:
        name, more = MODELS[method]
        calm = folder / name
        options = {"method": method, "num_speculative_tokens": 3, **more}
        if "model" in options:
            options["model"] = str(folder / options["model"])
        engines = {PLAIN: {}, method: {"speculative_config": json.dumps(options)}}
        self.method = method
        self.calm = calm
        config = json.loads((calm / "config.json").read_text())
        self.embedding_bytes = 4 * config["vocab_size"] * config["hidden_size"]
        self.engine = engines[method]
        # A drafter that is a whole model shares nothing with the model.
        self.peer = WorkerPeer((32 if method == DRAFT else 22) << 20, quota_max_s=0.1)
        self.loaded = {
            name: self.peer.load(name, calm, max_model_len=512, engine=engine)
            for name, engine in engines.items()
        }
        self.plain = self.answers("alone", PLAIN)

    def answers(self, label: str, *models: str, cut: int = 0) -> list[list[int]]:
        """Ask the models all prompts at once, for the tokens after ``cut``; return the answers."""
        ids = [(model, i, f"{label}-{model}-{i}") for model in models for i in range(NUM_PROMPTS)]
        for model, index, request_id in ids:
            known = self.plain[index][:cut] if cut else []
            self.peer.ask(model, request_id, prompt(index), known, max_tokens=NUM_TOKENS)
        self.peer.run_until_ended(*(request_id for _, _, request_id in ids))
        return [self.peer.tokens[request_id] for _, _, request_id in ids]


@pytest.fixture(
    scope="module",
    params=[
        NGRAM,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (EAGLE, EAGLE3, MTP, DRAFT)),
    ],
)
def box(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    project_env: dict[str, str],
) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("calm")
    make = [sys.executable, "-m", "scripts.tiny_drafter", str(folder)]
    subprocess.run(make, env=project_env, check=True)
    box = Box(folder, request.param)
    yield box
    box.peer.call("check_integrity")
    box.peer.close()


def test_drafts_change_no_token(box: Box) -> None:
    box.peer.switches.clear()
    before = box.peer.drafts
    assert box.answers("together", PLAIN, box.method) == box.plain * 2
    drafts = box.peer.drafts
    assert drafts.num_accepted_tokens > before.num_accepted_tokens, "no step with several tokens"
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens or box.method == DRAFT
    assert box.peer.switches
    assert drafts.acceptance_length is not None


def test_answers_continue_after_a_part_of_them(box: Box) -> None:
    cut = NUM_TOKENS // 2
    rests = [answer[cut:] for answer in box.plain]
    assert box.answers("resumed", box.method, cut=cut) == rests


def test_weights_and_kv_are_the_same_bytes_after_a_switch(box: Box) -> None:
    box.peer.ask(box.method, "paused", prompt(1), max_tokens=300)
    while len(box.peer.tokens["paused"]) < 20:
        box.peer.pump(1.0)
    before, _, _, after = box.peer.call_many(
        [
            ("checksum", {"model": box.method}),
            ("page_out", {"model": box.method}),
            ("checksum", {"model": PLAIN}),
            ("checksum", {"model": box.method}),
        ]
    )
    assert after == before
    box.peer.abort(box.method, "paused")


def test_a_snapshot_has_the_drafters_weights(box: Box) -> None:
    weights = {name: one.model.weight_bytes for name, one in box.loaded.items()}
    drafter_bytes = weights[box.method] - weights[PLAIN]
    assert drafter_bytes > 0 or box.method == NGRAM
    if box.method in (EAGLE, MTP):
        assert drafter_bytes < 2 * box.embedding_bytes, "shared weights occur once"
    again = box.peer.load(
        "again",
        box.calm,
        max_model_len=512,
        engine=box.engine,
        snapshot=box.peer.snapshots[box.method],
    )
    assert again.snapshot_problem == ""
    assert again.layout_digest == box.loaded[box.method].layout_digest
    accepted = []
    for model in (box.method, "again"):
        before = box.peer.drafts.num_accepted_tokens
        assert box.answers("snapshot", model) == box.plain
        accepted.append(box.peer.drafts.num_accepted_tokens - before)
    assert accepted[0] > (5 if box.method == NGRAM else NUM_TOKENS)
    assert accepted[1] == pytest.approx(accepted[0], rel=0.05), "other weights draft otherwise"
