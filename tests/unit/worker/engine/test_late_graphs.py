"""Sizes of batches whose CUDA graphs are captured at the load and later, with vLLM's manager."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.worker import workspace  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import (  # noqa: E402
    BatchExecutionDescriptor,
    CudaGraphManager,
)

from gpupoold.durations import GraphSizes  # noqa: E402
from gpupoold.worker.engine import late_graphs  # noqa: E402
from gpupoold.worker.engine.configuration import _CAPTURED_TOKENS  # noqa: E402
from gpupoold.worker.engine.late_graphs import (  # noqa: E402
    SELF_CHECK_TOKENS,
    LateGraphs,
    first_sizes,
)

LARGE = [size for size in _CAPTURED_TOKENS if size <= 256]
SMALL = [1, 2, 4, 8, 16, 32, 64]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        (LARGE, [1, 4, 16, 64, 256]),
        (SMALL, [1, 4, 16, 64]),
        ([1, 2, 4, 8, 16], [1, 4, 16]),
        ([1, 2, 4, 8, 16, 20], [1, 4, 16, 20]),
        ([6, 24, 40], [6, 24, 40]),
        ([8], [8]),
    ],
)
def test_few_sizes_come_first(sizes: list[int], first: list[int]) -> None:
    assert first_sizes(sizes) == first


@given(st.sets(st.integers(1, 600), min_size=1))
def test_what_runs_alone_keeps_its_size(found: set[int]) -> None:
    """The self-check's answer must not change, for its sums could be added in another order."""
    sizes = sorted(found)
    first = first_sizes(sizes)
    for num_tokens in (1, SELF_CHECK_TOKENS):
        assert padded(num_tokens, first) == padded(num_tokens, sizes)
    assert first[-1] == sizes[-1]
    assert set(first) <= found


def padded(num_tokens: int, sizes: list[int]) -> int | None:
    return next((size for size in sizes if size >= num_tokens), None)


class Device:
    """Counts the memory of captures, and plays what a collection of garbage would break."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 1 << 30
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free_bytes, 1 << 30))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(workspace, "_manager", None)
    return Device(monkeypatch)


def manager_of(sizes: list[int], mode: CUDAGraphMode) -> CudaGraphManager:
    """As vLLM makes it, but for groups and the device."""
    made = CudaGraphManager.__new__(CudaGraphManager)
    made.vllm_config = SimpleNamespace(  # type: ignore[assignment]
        speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False)
    )
    made.compilation_config = SimpleNamespace(  # type: ignore[assignment]
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
    )
    made.max_num_reqs, made.decode_query_len, made.varlen_decode = sizes[-1], 1, False
    made.cudagraph_mode, made.ubatch_runner, made.lora_capture_cases = mode, None, [0]
    made._lora_dispatch_map, made._max_lora_case = made._build_lora_dispatch_map()
    made.graphs, made._graphs_captured = {}, False
    made._candidates, made._capture_descs = {}, {}
    made._init_candidates()
    return made


def recording(
    manager: CudaGraphManager, device: Device, failing: set[int]
) -> tuple[list[BatchExecutionDescriptor], Callable[[], None]]:
    """What is captured, and a capture as vLLM's."""
    captured: list[BatchExecutionDescriptor] = []

    def capture() -> None:
        for descriptors in manager._capture_descs.values():
            for one in descriptors:
                if one.num_tokens in failing:
                    raise AssertionError("the workspace is locked")
                assert one not in captured
                device.free_bytes -= 3 * MIB if captured else 100 * MIB
                captured.append(one)
        manager._graphs_captured = True

    return captured, capture


def dispatched(manager: CudaGraphManager, num_tokens: int, *, is_decode: bool) -> Any:
    uniform = 1 if is_decode else None
    return manager.dispatch(num_tokens, num_tokens, uniform, num_active_loras=0)


@pytest.mark.parametrize("sizes", [LARGE, SMALL, [1, 2, 4], [32]])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"])
def test_batches_run_with_captured_graphs_alone(
    device: Device, sizes: list[int], mode: str
) -> None:
    """In the end with those that vLLM would have captured at once."""
    manager, whole = (manager_of(sizes, CUDAGraphMode[mode]) for _ in range(2))
    whole._graphs_captured = True
    captured, capture = recording(manager, device, set())
    graphs = LateGraphs(manager, capture)
    graphs.capture_first()
    free_bytes, num_left = device.free_bytes, graphs.sizes.num_left
    assert graphs.sizes.num_first == len(first_sizes(sizes)) == len(sizes) - num_left
    while True:
        for num_tokens in range(1, sizes[-1] + 2):
            for is_decode in (True, False):
                found = dispatched(manager, num_tokens, is_decode=is_decode)
                wanted = dispatched(whole, num_tokens, is_decode=is_decode)
                assert found in captured or found.cg_mode is CUDAGraphMode.NONE
                if is_decode:
                    assert found.cg_mode is wanted.cg_mode
                    assert found.num_tokens >= wanted.num_tokens
                else:  # sums are added up in the same order at any time
                    assert found.num_tokens == wanted.num_tokens
                    assert found.num_reqs in (num_tokens, wanted.num_reqs)
                if not graphs.sizes.num_left:
                    assert found == wanted
        if not graphs.sizes.num_left:
            break
        graphs.capture_next()
    assert graphs.sizes.num_late == num_left
    assert manager._capture_descs == whole._capture_descs
    assert sizes == manager.compilation_config.cudagraph_capture_sizes
    assert free_bytes - device.free_bytes <= graphs.reserved_bytes


def test_an_error_leaves_the_captured_sizes(device: Device) -> None:
    manager = manager_of(SMALL, CUDAGraphMode.FULL_AND_PIECEWISE)
    captured, capture = recording(manager, device, {8})
    graphs = LateGraphs(manager, capture)
    graphs.capture_first()
    graphs.capture_next()
    assert (graphs.sizes.num_late, graphs.sizes.num_left) == (1, 2)
    graphs.capture_next()
    assert (graphs.sizes.num_late, graphs.sizes.num_left) == (1, 0)
    for num_tokens, size in ((2, 2), (7, 16), (8, 16), (30, 64)):
        found = dispatched(manager, num_tokens, is_decode=True)
        assert found in captured
        assert found.num_tokens == size


def test_each_engine_captures_in_its_own_workspace(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = SimpleNamespace(), list[Any]()
    monkeypatch.setattr(workspace, "_manager", own)
    manager = manager_of(SMALL, CUDAGraphMode.FULL)
    _, capture = recording(manager, device, set())

    def capture_here() -> None:
        seen.append(workspace._manager)
        capture()

    graphs = LateGraphs(manager, capture_here)
    graphs.capture_first()
    monkeypatch.setattr(workspace, "_manager", None)  # another engine's
    graphs.capture_next()
    assert all(one is own for one in seen)


def test_the_driver_takes_memory_for_each_size(device: Device) -> None:
    """Also where the memory that torch has taken is enough for a graph."""
    manager = manager_of(SMALL, CUDAGraphMode.FULL)
    graphs = LateGraphs(manager, lambda: None)
    graphs.capture_first()
    assert graphs.reserved_bytes == 3 * late_graphs._LEAST_BYTES
    assert graphs.sizes == GraphSizes(4, num_left=3)
