"""Models are added, replaced and removed while another model's streams run, on a real engine."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families.make import make_family
from benchmarks.families.table import family_named
from gpupoold.checkpoints.files import read_json
from gpupoold.checkpoints.tiny import Recipe
from gpupoold.domain import ModelName
from gpupoold.units import parse_size_bytes
from gpupoold.wire import messages as m
from scripts.tiny_quantized import FORMATS, make_quantized
from tests.functional.daemon_tools import weight_bytes
from tests.functional.engine_peer import MAX_MODEL_LEN, EngineSet
from tests.functional.worker_peer import WorkerPeer, encode_request

# vLLM's own warnings while an engine is built in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = {"one": list(range(5, 95)), "two": list(range(40, 61))}
NUM_TOKENS = 150
SHORT_TOKENS = 24
# Requests that do not fit on a device beside the weights.
LONG = {"gptq": 1 << 15, "awq": 1 << 15, "w4a16": 1 << 15, "w8a8": 1 << 14, "fp8-channel": 1 << 14}
REFUSED = re.compile("does not fit beside the weights|leave no space for KV")
# A load borrows pages for three times the experts of a layer: here for two thirds of the model.
# vLLM makes its groups for experts with a process's first engine only, so that one comes first.
KINDS = {"borrower": "tiny-mixtral", "streams": "tiny-llama", "other": "tiny-qwen3"}


@pytest.fixture(scope="module")
def alone(tiny_models: dict[str, Path]) -> dict[str, list[int]]:
    """The tokens of the requests in vLLM without gpupool; of ``other`` from the other model."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()  # of other tests in this process
    paths = {name: tiny_models[kind] for name, kind in KINDS.items()}
    engines = EngineSet(paths)
    asked = {name: ("streams", prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}
    asked |= {name: (name, PROMPTS["two"], SHORT_TOKENS) for name in ("other", "borrower")}
    tokens: dict[str, list[int]] = {}
    for request_id, (model, prompt, num_tokens) in asked.items():
        frames = encode_request(request_id, prompt, max_tokens=num_tokens, ignore_eos=True)
        engines.add(m.AddRequest(model, request_id, 0.0, len(prompt), 0, frames))
        tokens[request_id] = []
        while engines.open_requests(model):
            for step in engines.step(model):
                for item in step.progress:
                    tokens[request_id] += item.new_token_ids
    return tokens


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device for about two models, with the first of them."""
    made = WorkerPeer(int(2.5 * max(map(weight_bytes, tiny_models.values()))))
    try:
        made.load("streams", tiny_models["tiny-llama"], max_model_len=MAX_MODEL_LEN)
        yield made
    finally:
        made.close()


@pytest.fixture
def streams(peer: WorkerPeer, alone: dict[str, list[int]]) -> Iterator[list[str]]:
    """Two streams of the first model, exact to the end whatever the test has done meanwhile."""
    ids = [f"{name}-{uuid.uuid4()}" for name in PROMPTS]
    for request_id, prompt in zip(ids, PROMPTS.values(), strict=True):
        peer.ask("streams", request_id, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    while not all(peer.tokens[request_id] for request_id in ids):
        peer.pump(1.0)
    yield ids
    peer.run_until_ended(*ids)
    assert [peer.tokens[request_id] for request_id in ids] == [alone[name] for name in PROMPTS]
    peer.call("check_integrity")


def test_a_model_is_added_beside_streams(
    peer: WorkerPeer, streams: list[str], alone: dict[str, list[int]], tiny_models: dict[str, Path]
) -> None:
    before = num_tokens(peer, streams)
    peer.load("other", tiny_models["tiny-qwen3"], max_model_len=MAX_MODEL_LEN)
    assert num_tokens(peer, streams) > before + 2, "the streams waited for the load"
    peer.call("check_integrity")
    assert ask_other(peer) == alone["other"]


def test_a_model_is_replaced_beside_streams(
    peer: WorkerPeer, streams: list[str], alone: dict[str, list[int]], tiny_models: dict[str, Path]
) -> None:
    send_load(peer, "other", tiny_models["tiny-qwen3"], profiling_budget_s=0.5)
    answer = peer.wait(m.ModelLoaded)
    os.close(peer.channel.take_fd())
    assert (answer.dropped, answer.profile is None) == ([], False)
    stages = answer.stages
    assert min(stages.build_s, stages.read_s, stages.snapshot_s, stages.check_s) > 0
    assert (stages.profile_s > 0.1, stages.capture_s) == (True, 0)
    assert ask_other(peer) == alone["other"]


def test_a_failed_load_disturbs_nobody(
    peer: WorkerPeer, streams: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    send_load(peer, "broken", tmp_path)
    assert peer.wait(m.ModelFailed).name == "broken"


def test_a_model_is_removed_beside_streams(peer: WorkerPeer, streams: list[str]) -> None:
    unload(peer, "other")


def test_a_load_is_cancelled_by_the_order_to_unload(
    peer: WorkerPeer, streams: list[str], tiny_models: dict[str, Path]
) -> None:
    """While it is under way, and while it waits; the next load of the name is another one."""
    path = tiny_models["tiny-qwen3"]
    for name in ("first", "second"):
        send_load(peer, name, path)
    wait_loading(peer)
    assert peer.status is not None
    assert peer.status.loading is not None
    assert (peer.status.loading.model, peer.status.loading.num_waiting) == ("first", 1)
    for name in ("first", "second"):
        peer.channel.send(m.UnloadModel(name))
    send_load(peer, "second", path)
    kinds: Any = m.ModelFailed | m.ModelLoaded | m.ModelUnloaded
    ends = [peer.wait(kinds) for _ in range(5)]
    expected = [m.ModelFailed, m.ModelUnloaded, m.ModelFailed, m.ModelUnloaded, m.ModelLoaded]
    assert [type(end) for end in ends] == expected
    assert "was unloaded while being loaded" in ends[0].message
    os.close(peer.channel.take_fd())
    peer.call("check_integrity")
    unload(peer, "second")


def test_a_worker_ends_during_a_load(peer: WorkerPeer, tiny_models: dict[str, Path]) -> None:
    """The last test: the module's fixture waits for the end."""
    send_load(peer, "late", tiny_models["tiny-qwen3"])
    wait_loading(peer)


@pytest.fixture(
    scope="module", params=[1.3, *(pytest.param(one, marks=pytest.mark.slow) for one in (1.8, 2.5))]
)
def card(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device for so many models, with a model; a load takes the pages of more than a model."""
    yield from small_device(request.param, tiny_models["tiny-llama"])


@pytest.fixture(scope="module", params=[1.6, pytest.param(2.5, marks=pytest.mark.slow)])
def group(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    """As ``card``, a group of two emulated GPUs together."""
    yield from small_device(request.param, tiny_models["tiny-llama"], num_ranks=2)


def small_device(num_models: float, path: Path, num_ranks: int = 1) -> Iterator[WorkerPeer]:
    options = {"--num-gpus": num_ranks, "--are-cores-shared": int(num_ranks > 1)}
    made = WorkerPeer(int(num_models * weight_bytes(path)) // num_ranks, options=options)
    try:
        made.load("streams", path, max_model_len=MAX_MODEL_LEN)
        yield made
    finally:
        made.close()


@pytest.fixture
def small_card(card: WorkerPeer) -> Iterator[WorkerPeer]:
    """The device with that model alone before and after a test."""
    yield card
    card.call("check_integrity")
    unload(card, "borrower")
    card.tokens.clear()
    card.ended.clear()


def test_live_requests_survive_a_load_that_takes_their_pages(
    small_card: WorkerPeer, alone: dict[str, list[int]], tiny_models: dict[str, Path]
) -> None:
    """Those in progress, and those that arrive while the load has the pages."""
    peer = small_card
    peer.ask("streams", "one", PROMPTS["one"], max_tokens=NUM_TOKENS, ignore_eos=True)
    while not peer.tokens["one"]:
        peer.pump(1.0)
    send_load(peer, "borrower", tiny_models["tiny-mixtral"])
    wait_loading(peer)
    peer.ask("streams", "two", PROMPTS["two"], max_tokens=NUM_TOKENS, ignore_eos=True)
    peer.wait(m.ModelLoaded, 120.0)
    os.close(peer.channel.take_fd())
    peer.run_until_ended("one", "two")
    assert peer.ended == {"one": "length", "two": "length"}
    assert {name: peer.tokens[name] for name in PROMPTS} == {name: alone[name] for name in PROMPTS}


@pytest.mark.parametrize("is_idle", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_load_gets_the_pages_of_models_on_a_small_card(
    small_card: WorkerPeer, alone: dict[str, list[int]], tiny_models: dict[str, Path], is_idle: bool
) -> None:
    peer = small_card
    if not is_idle:
        peer.ask("streams", "one", PROMPTS["one"], max_tokens=NUM_TOKENS, ignore_eos=True)
    path = tiny_models["tiny-mixtral"]
    peer.load("borrower", path, max_model_len=MAX_MODEL_LEN, timeout_s=120.0)
    assert ask_other(peer, "borrower") == alone["borrower"]
    if not is_idle:
        peer.run_until_ended("one")
        assert peer.tokens["one"] == alone["one"]


@pytest.fixture(scope="module")
def deep_models(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Checkpoints of families and formats, whose layers are small beside the model."""
    folder = tmp_path_factory.mktemp("deep")

    def path_of(kind: str) -> Path:
        if kind in FORMATS:
            path = make_quantized(folder, kind, Recipe("llama", parse_size_bytes("10MB")))
            file = path / "config.json"
            file.write_text(json.dumps(read_json(file) | {"max_position_embeddings": LONG[kind]}))
            return path
        family = family_named(kind)
        num_layers = 4 if "deepseek" in kind else 12
        config = dict(family.config) | {"num_hidden_layers": num_layers}
        return make_family(replace(family, config=config), folder)

    return path_of


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3-moe", "float32"),
        ("deepseek-v2", "float32"),
        ("gptq", "float16"),
        ("w8a8", "float32"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("deepseek-v3", "float32"),
                ("awq", "float16"),
                ("w4a16", "bfloat16"),
                ("fp8-channel", "float32"),
            )
        ),
        ("gpt-neox", "float32"),
    ],
)
def test_a_load_takes_no_pages_of_an_idle_model_before_its_self_check(
    card: WorkerPeer, deep_models: Callable[[str], Path], kind: str, dtype: str
) -> None:
    """Unless the Transformers backend of vLLM makes the weights."""
    is_short = check_idle_model(card, deep_models(kind), kind, dtype)
    assert (missing_bytes(card, "streams") > 0) == (is_short and kind == "gpt-neox")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3-moe", "float32"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("deepseek-v2", "float32"), ("gptq", "float16"), ("w8a8", "float32"))
        ),
        ("gpt-neox", "float32"),
    ],
)
def test_a_group_loads_as_a_gpu_does(
    group: WorkerPeer,
    alone: dict[str, list[int]],
    deep_models: Callable[[str], Path],
    kind: str,
    dtype: str,
) -> None:
    """No rank takes pages of a model that is idle, or whose stream runs, before the self-check.

    But for the Transformers backend, where each rank takes pages for the weights of all ranks.
    """
    check_idle_model(group, deep_models(kind), kind, dtype)
    assert (missing_bytes(group, "streams") > 0) == (kind == "gpt-neox")
    group.call("check_integrity")
    if kind == "gpt-neox":
        return
    group.ask("streams", kind, PROMPTS["one"], max_tokens=NUM_TOKENS, ignore_eos=True)
    while not group.tokens[kind]:
        group.pump(1.0)
    send_load(group, "long", deep_models(kind), dtype=dtype, max_model_len=LONG.get(kind, 4096))
    assert REFUSED.search(group.wait(m.ModelFailed).message)
    assert missing_bytes(group, "streams") == 0
    group.run_until_ended(kind)
    assert group.tokens[kind] == alone["one"]


def check_idle_model(peer: WorkerPeer, path: Path, kind: str, dtype: str) -> bool:
    """Make a load that is refused after the read; return whether two models do not fit."""
    ask_other(peer, "streams")
    assert missing_bytes(peer, "streams") == 0
    send_load(peer, "long", path, dtype=dtype, max_model_len=LONG.get(kind, 4096))
    assert REFUSED.search(peer.wait(m.ModelFailed).message)
    both_bytes = weight_bytes(path) + peer.loaded["streams"].weight_bytes
    return peer.ready.facts.device_bytes < both_bytes


def missing_bytes(peer: WorkerPeer, model: str) -> int:
    """Bytes of the weights that are not on the device, in the next status."""
    peer.status = None
    while peer.status is None:
        peer.pump(1.0)
    [found] = [one for one in peer.status.models if one.model == model]
    return found.weights_total_bytes - found.weights_resident_bytes


def num_tokens(peer: WorkerPeer, ids: list[str]) -> int:
    return sum(len(peer.tokens[request_id]) for request_id in ids)


def ask_other(peer: WorkerPeer, model: str = "other") -> list[int]:
    request_id = f"{model}-{uuid.uuid4()}"
    peer.ask(model, request_id, PROMPTS["two"], max_tokens=SHORT_TOKENS, ignore_eos=True)
    peer.run_until_ended(request_id)
    return peer.tokens[request_id]


def wait_loading(peer: WorkerPeer) -> None:
    peer.status = None
    while peer.status is None or peer.status.loading is None:
        peer.pump(1.0)


def send_load(
    peer: WorkerPeer, name: str, path: Path, profiling_budget_s: float = 0.0, **options: Any
) -> None:
    """Order a load without a change of the scheduler's accounts."""
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    model = m.ModelToLoad(name=ModelName(name), source=name, path=str(path), **(fields | options))
    peer.channel.send(m.LoadModel(model, profiling_budget_s=profiling_budget_s))


def unload(peer: WorkerPeer, name: str) -> None:
    peer.channel.send(m.UnloadModel(name))
    assert peer.wait(m.ModelUnloaded).name == name
