"""The times of the stages of a load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from gpupoold.durations import LoadStages
from gpupoold.worker.weights.stages import LoadStage, StageClock


class Reader:
    def read(self, wait: Callable[[], None]) -> str:
        wait()
        return "read"


def test_each_second_counts_for_one_stage() -> None:
    now_s = 0.0

    def pass_second() -> None:
        nonlocal now_s
        now_s += 1

    stages, own = StageClock(lambda: now_s), Reader()
    pass_second()
    with (
        stages.during_calls(LoadStage.CAPTURE, own, "read"),
        stages.during_calls(LoadStage.READ, Reader, "read"),
        stages.during(LoadStage.COMPILE),
    ):
        pass_second()
        assert Reader().read(pass_second) == own.read(pass_second) == "read"
        assert stages.stage.value == "compiles"
    pass_second()
    assert Reader().read(pass_second) == own.read(pass_second) == "read"  # of no stage
    assert stages.so_far() == LoadStages(build_s=4, compile_s=1, read_s=1, capture_s=1)


def test_every_stage_has_its_time() -> None:
    assert [one.name.lower() for one in LoadStage] == list(LoadStages().by_name())
