"""What vLLM finds in the environment of a worker."""

from __future__ import annotations

import os

import pytest

from gpupoold.errors import Failed
from gpupoold.worker.process import engine_arguments, set_engine_environment


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
