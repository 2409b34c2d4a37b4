"""What vLLM finds in the environment of a worker, and the bytes of all ranks."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from gpupoold.domain import DeviceActivity
from gpupoold.engine_versions import KNOWN_VARIABLES
from gpupoold.errors import Failed
from gpupoold.wire import messages as m
from gpupoold.worker.process import engine_arguments, of_group, set_engine_environment
from tests.unit.wire.samples import MEMORY, SWITCH

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(("given", "used"), [(None, "0"), ("1", "1")])
def test_which_graphs_there_are_is_settled_before_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {_BREAKABLE: given})
    set_engine_environment("warning")
    assert os.environ[_BREAKABLE] == used


_BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def test_engines_get_arguments_from_the_environment() -> None:
    assert engine_arguments({}) == {}
    told = {"GPUPOOL_ENGINE_ARGUMENTS": '{"max_num_seqs": 16}'}
    assert engine_arguments(told) == {"max_num_seqs": 16}


@pytest.mark.parametrize("text", ["max_num_seqs=16", "16", "[]"])
def test_arguments_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(Failed, match=r"GPUPOOL_ENGINE_ARGUMENTS is not (a )?JSON"):
        engine_arguments({"GPUPOOL_ENGINE_ARGUMENTS": text})


def test_records_inside_count_for_all_ranks() -> None:
    status = m.WorkerStatus(6.5, DeviceActivity("llama", 99, 1 << 30, 0), 0.25, [MEMORY])
    memory = replace(MEMORY, weights_total_bytes=1 << 34, kv_resident_bytes=10, kv_host_bytes=12)
    assert of_group(status, 2).models == [memory]
    switch = of_group(m.Switched(SWITCH, 2.5e10), 2)
    assert switch.bandwidth_bytes_per_s == 5e10
    assert switch.switch.weight_bytes == 2 * SWITCH.weight_bytes
    assert switch.switch.total_s == SWITCH.total_s


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1"), ("0", "0")])
def test_flashinfer_samples_only_where_the_owner_asks_for_it(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether FlashInfer is installed or not: its kernels are compiled, perhaps in vain."""
    monkeypatch.setattr(os, "environ", {} if before is None else {SAMPLER: before})
    set_engine_environment("info")
    assert os.environ[SAMPLER] == after
    assert SAMPLER in KNOWN_VARIABLES, "the daemon passes it on"
