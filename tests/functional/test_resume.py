"""A request that goes on in an engine that knows nothing of it gives the tokens it would have."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from vllm.sampling_params import StructuredOutputsParams

from gpupoold.wire import messages as m
from tests.functional.worker_peer import WorkerPeer

MODELS = ("tiny-llama", "tiny-mixtral")
THINKER = "thinker"
NUM_TOKENS = 60
REGEX = "(ab?c|d[0-9]){12,40}"
BEGINNING = "(ab?c|d[0-9])*(ab?|d)?"
# A parser of reasoning is found in this template.
TEMPLATE = "{% if add_generation_prompt and enable_thinking is not false %}<think>{% endif %}"


def grammar(regex: str) -> StructuredOutputsParams:
    """As a frontend has it validated."""
    params = StructuredOutputsParams(regex=regex)
    params._backend = "xgrammar"
    return params


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "seeded": {"temperature": 0.9, "seed": 5},
    "seeded-nucleus": {"temperature": 1.2, "seed": 6, "top_p": 0.8, "top_k": 50},
    "biased": {"logit_bias": {301: 8.0, 302: -100.0}, "min_tokens": 40, "ignore_eos": False},
    "bad-words": {"_bad_words_token_ids": [[305], [306, 307]]},
    "grammar": {"structured_outputs": grammar(REGEX), "ignore_eos": False},
    "seeded-grammar": {
        "temperature": 1.0,
        "seed": 7,
        "structured_outputs": grammar(REGEX),
        "ignore_eos": False,
    },
}


SLOW = {"seeded-nucleus", "bad-words", "seeded-grammar"}


@pytest.fixture(scope="module")
def thinker(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has <think> and </think> in place of other tokens."""
    path = tmp_path_factory.mktemp("thinker") / THINKER
    shutil.copytree(tiny_models["tiny-llama"], path)
    tokenizer = (path / "tokenizer.json").read_text()
    tokenizer = tokenizer.replace("<tool_call>", "<think>").replace("</tool_call>", "</think>")
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path], thinker: Path) -> Iterator[WorkerPeer]:
    """A device with room for one of two models, in short turns."""
    peer = WorkerPeer(18 << 20, kv_host_bytes=64 << 20, quota_max_s=0.05)
    for name in MODELS:
        peer.load(name, tiny_models[name], max_model_len=512)
    peer.load(THINKER, thinker, max_model_len=512)
    yield peer
    peer.close()


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(5 + 40 * index)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_the_same_tokens_from_any_point_on(peer: WorkerPeer, case: str) -> None:
    sampling = {"max_tokens": NUM_TOKENS} | CASES[case]
    whole: dict[tuple[str, int], list[int]] = {}
    for model in MODELS:
        for index in (0, 2):
            request_id = f"{case}-whole-{model}-{index}"
            peer.ask(model, request_id, prompt(index), **sampling)
            peer.run_until_ended(request_id)
            whole[model, index] = peer.tokens[request_id]
    rng = random.Random(case)
    rests: dict[str, list[int]] = {}
    for (model, index), tokens in whole.items():
        for cut in {1, len(tokens) - 1, rng.randrange(1, len(tokens))}:
            request_id = f"{case}-{model}-{index}-after-{cut}"
            rests[request_id] = tokens[cut:]
            # All at once: each shares its batches with others.
            peer.ask(model, request_id, prompt(index), tokens[:cut], **sampling)
    peer.run_until_ended(*rests)
    assert {request_id: peer.tokens[request_id] for request_id in rests} == rests
    assert all(peer.ended[request_id] in ("length", "stop") for request_id in rests)
    peer.call("check_integrity")


def test_a_grammar_begins_after_the_reasoning_from_any_point_on(
    peer: WorkerPeer, thinker: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(thinker / "tokenizer.json"))
    begin, end = tokenizer.encode("<think></think>").ids
    sampling: dict[str, Any] = {
        "max_tokens": 40,
        "structured_outputs": grammar(REGEX),
        "ignore_eos": False,
        "thinking_token_budget": 9,
    }
    asked = [*prompt(1), begin]
    peer.ask(THINKER, "thinker-whole", asked, **sampling)
    peer.run_until_ended("thinker-whole")
    whole = peer.tokens["thinker-whole"]
    assert whole.index(end) == 9
    thought, text = tokenizer.decode(whole[:9]), tokenizer.decode(whole[10:])
    assert not re.fullmatch(BEGINNING, thought)
    assert re.fullmatch(BEGINNING, text)
    assert len(text) > 20
    cuts = (1, 8, 9, 10, 11, 25)
    for cut in cuts:
        peer.ask(THINKER, f"thinker-after-{cut}", asked, whole[:cut], **sampling)
    peer.run_until_ended(*(f"thinker-after-{cut}" for cut in cuts))
    rests = {cut: peer.tokens[f"thinker-after-{cut}"] for cut in cuts}
    assert rests == {cut: whole[cut:] for cut in cuts}


def test_prompts_in_chunks_beside_answers(
    peer: WorkerPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few tokens change no token, and let the answers under way go on."""
    model, chunk_tokens, lengths = MODELS[0], 40, {"short": 1, "long": 9, "longer": 10}
    alone: dict[str, list[int]] = {}
    for name, length in lengths.items():
        peer.ask(model, name, prompt(length), max_tokens=NUM_TOKENS)
        peer.run_until_ended(name)
        alone[name] = peer.tokens[name]
    while peer.state.devices[0].turn is not None:
        peer.pump(0.2)  # only another turn has chunks
    send, note = peer.channel.send, peer._note
    first_step: dict[str, int] = {}
    steps = itertools.count()

    def send_chunked(message: m.Message, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, m.RunTurn):
            message = msgspec.structs.replace(message, chunk_tokens=chunk_tokens)
        send(message, fds)

    def note_step(message: m.FromWorker) -> None:
        if isinstance(message, m.StepOutputs):
            step = next(steps)
            for one in message.progress:
                first_step.setdefault(one.request_id, step)
        note(message)

    monkeypatch.setattr(peer.channel, "send", send_chunked)
    monkeypatch.setattr(peer, "_note", note_step)
    for name, length in lengths.items():
        salt = f"{name}-chunked"  # else the prompts would be there already
        peer.ask(model, salt, prompt(length), cache_salt=salt, max_tokens=NUM_TOKENS)
    peer.run_until_ended(*(f"{name}-chunked" for name in lengths))
    assert {name: peer.tokens[f"{name}-chunked"] for name in lengths} == alone
    # Steps in which those that were quicker had a token, while the longer prompts were computed.
    waited = first_step["longer-chunked"] - first_step["short-chunked"]
    assert waited >= (len(prompt(9)) + len(prompt(10))) // chunk_tokens - 2
