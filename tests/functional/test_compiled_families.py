"""A fine-tune uses the code that vLLM has compiled for another model of its family."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.functional.engine_peer import MAX_MODEL_LEN
from tests.functional.worker_peer import WorkerPeer

torch = pytest.importorskip("torch", reason="the engine is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="the engine is not installed")

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 60))
NUM_TOKENS = 16
DEVICE_BYTES = 200 << 20


def fine_tune(base: Path, folder: Path) -> Path:
    """Write a checkpoint with another's configuration and other weights."""
    made = Path(shutil.copytree(base, folder))
    random = torch.Generator().manual_seed(5)
    for file in made.glob("*.safetensors"):
        weights = safetensors.load_file(file)
        for one in weights.values():
            one += 0.02 * torch.randn(one.shape, generator=random)
        safetensors.save_file(weights, file, {"format": "pt"})
    return made


def answer(peer: WorkerPeer, name: str, path: Path, *, is_compiled: bool) -> list[int]:
    options = {"enforce_eager": "false"} if is_compiled else {}
    peer.load(name, path, max_model_len=MAX_MODEL_LEN, engine=options, timeout_s=500.0)
    peer.ask(name, name, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    peer.run_until_ended(name)
    return peer.tokens[name]


def test_a_second_model_of_a_family_is_not_compiled(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_models["tiny-llama"]
    other = fine_tune(base, tmp_path / "fine-tune")
    cache = tmp_path / "cache"
    peer = WorkerPeer(DEVICE_BYTES, environment={"VLLM_CACHE_ROOT": str(cache)})
    try:
        first = answer(peer, "base", base, is_compiled=True)
        # vLLM traces a model on a CPU each time, and finds the compiled kernels.
        [folder] = cache.glob("torch_compile_cache/torch_aot_compile/*")
        kernels = {*folder.rglob("*.so")}
        second = answer(peer, "fine-tune", other, is_compiled=True)
        assert [*cache.glob("torch_compile_cache/torch_aot_compile/*")] == [folder]
        assert kernels
        assert {*folder.rglob("*.so")} == kernels
        assert first == answer(peer, "base-eager", base, is_compiled=False)
        assert second == answer(peer, "fine-tune-eager", other, is_compiled=False)
        assert first != second
    finally:
        peer.close()
