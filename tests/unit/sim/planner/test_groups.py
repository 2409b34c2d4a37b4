"""The choice of groups: what is possible, what is ranked, and unlike groups in one box."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.models import StoredFit, StoredLatency
from gpupoold.latency.profiles import latency_for
from gpupoold.latency.shape import builtin_shape
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.planner.groups import GroupQuestion, choose_groups, group_throughput, groupings
from gpupoold.sim.planner.load import poisson_load
from gpupoold.sim.planner.models import PlannedModel, place
from gpupoold.sim.planner.notes import notes_on
from gpupoold.sim.planner.plan import PlanQuestion, make_plan

ALL = (1, 2, 4, 8)


def planned(name: str, shape_name: str) -> PlannedModel:
    shape = builtin_shape(shape_name)
    return PlannedModel(name, Targets(), shape.weight_bytes, shape.kv_bytes_per_token, shape=shape)


def question(devices: str, rps: float = 0.1, **shapes: str) -> GroupQuestion:
    models = tuple(planned(name, shape) for name, shape in shapes.items())
    load = poisson_load(dict.fromkeys(shapes, rps), 30.0)
    return GroupQuestion(parse_box(devices), load, models, 0.99)


def test_ways_to_group() -> None:
    assert groupings(4, ALL) == [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
    assert len(groupings(8, ALL)) == 10
    assert groupings(3, (1, 2)) == [(2, 1), (1, 1, 1)]
    large = groupings(16, ALL)
    assert (8, 8) in large
    assert (8, *(1,) * 8) in large
    assert all(sum(one) == 16 and len(set(one)) <= 2 for one in large)
    assert len(set(large)) == len(large) < 50


class TestEquationSix:
    """The most tokens per GPU: by memory in a small group, by the target in a large one."""

    shape = builtin_shape("Qwen-72B")

    def rate(self, num_gpus: int, room_bytes: float, tbt_s: float = 0.1) -> float:
        latency = latency_for("H800", self.shape, num_gpus=num_gpus)
        kv_bytes = self.shape.kv_bytes_per_token
        return group_throughput(latency, num_gpus, int(room_bytes), kv_bytes, 1000, tbt_s)

    def test_bounded_by_memory(self) -> None:
        batch = 4
        room_bytes = batch * 1000 * self.shape.kv_bytes_per_token
        latency = latency_for("H800", self.shape, num_gpus=4)
        expected = batch / (4 * latency.decode_step_s(batch, batch * 1000))
        assert self.rate(4, room_bytes) == pytest.approx(expected, rel=1e-3)

    def test_bounded_by_the_target(self) -> None:
        latency = latency_for("H800", self.shape, num_gpus=4)
        rate = self.rate(4, 1e15, tbt_s=0.05)
        batch = rate * 4 * 0.05
        assert latency.decode_step_s(round(batch), round(batch) * 1000) == pytest.approx(
            0.05, rel=0.05
        )

    def test_no_place_for_a_sequence(self) -> None:
        assert self.rate(4, 0) == 0
        assert self.rate(4, 1e12, tbt_s=0.001) == 0


def test_large_models_get_a_group_and_single_gpus_are_compared() -> None:
    choice = choose_groups(question("4xH800", big="Qwen-72B", small="Qwen2.5-7B"))
    assert choice.best_degrees["small"] == 1 < choice.best_degrees["big"]
    assert max(choice.box.groups) >= 2
    last = choice.tried[-1]
    assert last.groups == (1, 1, 1, 1)
    assert "big weighs 145 GB" in last.refused
    growths = [one.growth for one in choice.tried]
    assert growths == sorted(growths, reverse=True)


def test_small_models_stay_on_single_gpus() -> None:
    """A group divides the work of a step, not the time of launches."""
    choice = choose_groups(question("2xH800", rps=8.0, a="Qwen2.5-7B", b="Yi-1.5-9B"))
    assert choice.box.groups == (1, 1)
    assert [one.groups for one in choice.tried] == [(1, 1), (2,)]


def test_what_the_daemon_could_not_run_is_not_planned() -> None:
    """28 heads are not divisible by 8, and 145 GB do not fit on two A10 (or 4)."""
    eight = choose_groups(question("8xH800", qwen="Qwen2.5-7B"))
    assert all(8 not in one.groups for one in eight.tried)
    with pytest.raises(UsageError, match="no grouping of 4xA10 can run all models: big weighs"):
        choose_groups(question("4xA10", big="Qwen-72B"))
    with pytest.raises(UsageError, match="28 attention heads are not divisible by 8"):
        place([planned("qwen", "Qwen2.5-7B")], parse_box("1x8xH800"))


def test_a_box_of_unlike_groups_runs_each_model_where_it_can() -> None:
    asked = question("8xH800", big="Qwen-72B", small="Qwen2.5-7B")
    box = asked.box.split((4, 1, 1, 1, 1))
    placed = place(asked.models, box)
    assert set(placed.by_degree[4]) == {"big", "small"}
    assert set(placed.by_degree[1]) == {"small"}
    assert placed.models["big"].latency == placed.by_degree[4]["big"].latency
    plan = make_plan(
        PlanQuestion(box, asked.load, placed.models, 0.99, seeds=(0,), by_degree=placed.by_degree)
    )
    assert plan.fits
    assert plan.attained.overall == 1.0
    assert not math.isnan(plan.forecast.models["big"].ttft_s.p50 or math.nan)
    # The first group alone runs both.
    assert plan.needed == 1


def test_unlike_groups_miss_targets_as_equal_ones_do() -> None:
    asked = question("5xH800", big="Qwen-72B", small="Qwen2.5-7B")
    asked = replace(asked, load=poisson_load({"big": 1.5}, 40.0))
    box = asked.box.split((4, 1))
    placed = place(asked.models, box)
    alone = place(asked.models, parse_box("1x4xH800"))
    setup = PlanQuestion(
        box, asked.load, placed.models, 0.99, seeds=(0,), by_degree=placed.by_degree
    )
    mixed = make_plan(setup)
    single = make_plan(replace(setup, box=parse_box("1x4xH800"), models=alone.models, by_degree={}))
    assert mixed.attained.overall == pytest.approx(single.attained.overall)
    assert {one.kind for one in mixed.changes}.isdisjoint({"link", "gpu"})


class TestMeasured:
    """What a daemon has measured on a group decides, and the report says so."""

    def asked(self, device: str, decode_s: float) -> GroupQuestion:
        fit = StoredFit("LinearPrefill", (1e-4, 0.01), 0.99, 0.03, 0.07, 9)
        decode = StoredFit("LinearDecode", (1e-9, 1e-5, decode_s), 0.99, 0.03, 0.07, 9)
        own = StoredLatency(device, "0.32.0", "bfloat16", 1.75e9, 5e10, fit, decode)
        model = replace(planned("one", "Qwen2.5-7B"), measured=(own,))
        return GroupQuestion(parse_box("2xH800"), poisson_load({"one": 0.2}, 60.0), (model,), 0.99)

    @pytest.mark.parametrize(("decode_s", "groups"), [(0.0001, (2,)), (5.0, (1, 1))])
    def test_a_fast_group_is_chosen_and_a_slow_one_is_not(
        self, decode_s: float, groups: tuple[int, ...]
    ) -> None:
        asked = self.asked("2 x NVIDIA H800", decode_s)
        # A target that only fast steps meet.
        strict = replace(asked.models[0], targets=Targets(10.0, 0.004 if decode_s < 1 else 0.1))
        choice = choose_groups(replace(asked, models=(strict,)))
        assert choice.box.groups == groups

    def noted(self, device: str) -> tuple[Mapping[str, str], str]:
        """The basis and the notes of a plan for the group, after a measurement on ``device``."""
        asked = self.asked(device, 0.01)
        box = asked.box.split((2,))
        placed = place(asked.models, box)
        question = PlanQuestion(box, asked.load, placed.models, 0.99)
        notes = notes_on(question, make_plan(question), placed.basis, asked.models)
        return placed.basis, " ".join(notes)

    def test_the_notes_name_the_group(self) -> None:
        basis, notes = self.noted("2 x NVIDIA H800")
        assert basis == {"one": "measured"}
        assert "Step times of one: measured by the daemon on 2 x H800." in notes

    def test_a_measurement_on_single_gpus_is_not_one_of_groups(self) -> None:
        basis, notes = self.noted("NVIDIA H800")
        assert basis == {"one": "scaled"}
        assert "measurements of one on NVIDIA H800 do not apply to 2 x H800" in notes
