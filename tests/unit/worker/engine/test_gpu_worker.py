"""Our worker on a GPU, without one: the order in which things are done around vLLM's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

from gpupoold.worker.engine import gpu_worker as worker  # noqa: E402


def test_pages_stay_until_warm_up_has_ended_on_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Load:
        """A load whose KV is readable and writable for a while."""

        @contextlib.contextmanager
        def kv_scratch(self) -> Iterator[None]:
            done.append("mapped")
            yield
            done.append("unmapped")

    def warm_up(_: Worker) -> str:
        done.append("warm-up")
        return "times"

    monkeypatch.setattr(worker, "current_load", Load)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("device idle"))
    made = worker.CudaWorker.__new__(worker.CudaWorker)
    assert made.compile_or_warm_up_model() == "times"
    assert done == ["mapped", "warm-up", "device idle", "unmapped"]


@pytest.mark.parametrize(
    ("supported", "first"),
    [
        (["LBNHC", "LBHNC", "BLNHC", "BLHNC"], "BLNHC"),  # any, as FlashAttention has it
        (["LBHNC", "BLHNC"], "BLHNC"),  # FlashInfer's
        (["LBHNC"], "LBHNC"),
    ],
)
def test_blocks_are_outermost_where_attention_takes_that(
    monkeypatch: pytest.MonkeyPatch, supported: list[str], first: str
) -> None:
    monkeypatch.setattr(Worker, "get_supported_kv_cache_layouts", lambda _: supported)
    found = worker.CudaWorker.__new__(worker.CudaWorker).get_supported_kv_cache_layouts()
    assert found[0] == first
    assert set(found) == set(supported)
