"""All-reduces of vLLM that several engines share."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from gpupoold.worker.engine.vllm_process import between_captures, copy_in_captures
from gpupoold.worker.process import set_group_environment


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own object, which is disabled on a machine without its kernels."""
    made = CustomAllreduce(None, "cuda:0")
    group = SimpleNamespace(device_communicator=SimpleNamespace(ca_comm=made))
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    return made


def test_captured_inputs_are_not_opened_by_the_other_ranks(custom: Any) -> None:
    assert custom._capture_registered
    copy_in_captures()
    assert not custom._capture_registered


def test_steps_between_two_captures_get_results(custom: Any) -> None:
    """vLLM returns memory without a result while an object is marked as capturing."""
    with custom.capture():
        assert custom._IS_CAPTURING
        with between_captures():
            assert not custom._IS_CAPTURING
        assert custom._IS_CAPTURING
    with between_captures():
        assert not custom._IS_CAPTURING
    assert not custom._IS_CAPTURING


def test_an_error_of_a_step_leaves_the_capture_marked(custom: Any) -> None:
    with custom.capture():
        with pytest.raises(ValueError, match="a step"), between_captures():
            raise ValueError("a step")
        assert custom._IS_CAPTURING


@pytest.mark.parametrize("group", [None, SimpleNamespace(device_communicator=None)])
def test_single_gpus_and_the_cpu_have_no_such_object(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: group is not None)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    copy_in_captures()
    with between_captures():
        pass


def test_the_environment_wins_over_the_choice_of_gpupool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    set_group_environment()
    assert os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] == "1"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
