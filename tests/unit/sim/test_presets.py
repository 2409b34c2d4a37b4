"""Presets as data: all can be drawn, options change them, figures have the paper's numbers."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import Box, parse_box
from gpupoold.sim.host import HostWishes
from gpupoold.sim.presets import (
    SMALL_BOX,
    SYNTH_SCENARIOS,
    poisson_panel,
    preset_names,
    preset_panels,
    trace_panel,
)
from gpupoold.sim.scenario import Draw, FigurePanel, Overrides, build_scenario
from gpupoold.sim.traces import FunctionCalls, RecordedTrace
from tests.sim.points import preset_points

ONE_POLICY = ("request-level",)
FIGURES = [name for name in preset_names() if name.startswith("aegaeon-fig")]
BURSTS = [name for name in preset_names() if name.startswith("tokenscale")]
OTHERS = ("small-box", "aladdin-fig10", "prism-overload", "conversations")
RECORDED = [name for name in preset_names() if name not in (*FIGURES, *BURSTS, *OTHERS)]


def panel(name: str) -> FigurePanel:
    [only] = preset_panels(name)
    return only


def write(path: Path, *lines: str) -> Path:
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


class TestFigures:
    @pytest.mark.parametrize("name", FIGURES)
    def test_can_be_drawn(self, name: str) -> None:
        short = None if name == "aegaeon-fig6" else 5.0
        for point in preset_points(name, Overrides(policies=ONE_POLICY, duration_s=short)):
            scenario = build_scenario(point)
            assert {one.model for one in scenario.requests} <= scenario.models.keys()
            assert scenario.end_s >= 4 * scenario.duration_s

    def test_numbers_of_the_paper(self) -> None:
        fig11a = panel("aegaeon-fig11a")
        assert (fig11a.box, fig11a.num_prefill) == (Box(16, "H800"), 6)
        assert (fig11a.rps, fig11a.targets) == ((0.1,), Targets(10.0, 0.1))
        assert {70, 160} <= set(fig11a.models)
        assert panel("aegaeon-fig11b").rps == (0.5,)
        assert panel("aegaeon-fig11c").axis == "rps"
        targets = [one.targets for one in preset_panels("aegaeon-fig13")]
        assert targets == [Targets(5.0, 0.05), Targets(3.0, 0.03), Targets(2.0, 0.02)]
        a10 = panel("aegaeon-fig17-a10")
        assert (a10.num_prefill, a10.without_prefetch) == (2, ("aegaeon",))
        assert panel("aegaeon-fig17-a10-strict").targets.tbt_s == 0.05
        assert panel("aegaeon-fig17-72b").box == Box(2, "H800", (4,))
        assert panel("aegaeon-fig6").policies == ("prefill-first", "decode-first", "aegaeon")

    def test_longer_prompts_and_outputs(self) -> None:
        wanted = Overrides(policies=ONE_POLICY, models=(4,), duration_s=200.0)
        plain, ix2, ox2 = (
            build_scenario(preset_points(name, wanted)[0]).requests
            for name in ("aegaeon-fig11a", "aegaeon-fig12-ix2", "aegaeon-fig12-ox2")
        )
        assert [one.prompt_tokens for one in ix2] == [2 * one.prompt_tokens for one in plain]
        assert [one.output_tokens for one in ox2] == [2 * one.output_tokens for one in plain]

    def test_the_burst_is_ten_times_the_rate_before_and_after(self) -> None:
        panels = preset_panels("tokenscale-burst")
        assert [one.name for one in panels] == BURSTS[:-1]
        assert [one.roles for one in panels] == [
            (Role.PREFILL, Role.DECODE),
            (Role.PREFILL, Role.DECODE),
            (Role.MIXED,),
        ]
        assert [one.converts_decoders for one in panels] == [True, False, True]
        drawn = [build_scenario(point) for point in preset_points("tokenscale-burst")]
        assert drawn[0].requests == drawn[1].requests == drawn[2].requests
        counts = [0, 0, 0]
        for one in drawn[0].requests:
            counts[int(one.arrival_s // 60)] += 1
        assert counts[1] > 7 * max(counts[0], counts[2])
        other = preset_points("tokenscale-burst", Overrides(seed=1))
        assert build_scenario(other[0]).requests != drawn[0].requests
        with pytest.raises(UsageError, match="rates are fixed"):
            build_scenario(preset_points("tokenscale-burst", Overrides(rps=(2.0,)))[0])

    def test_roles_are_for_all_devices_or_each(self) -> None:
        [point] = preset_points("tokenscale-burst-mixed")
        assert point.panel.device_roles == (Role.MIXED,) * 2
        auto = panel("tokenscale-burst-mixed").changed(Overrides(roles="auto"))
        assert auto.device_roles is None
        with pytest.raises(UsageError, match="3 roles for 2 devices"):
            preset_points("tokenscale-burst-mixed", Overrides(roles=(Role.DECODE,) * 3))

    def test_several_panels_under_one_name(self) -> None:
        names = [one.name for one in preset_panels("aegaeon-fig12")]
        assert names == ["aegaeon-fig12-ix2", "aegaeon-fig12-ox2"]
        points = preset_points("aegaeon-fig12", Overrides(policies=ONE_POLICY, models=(2,)))
        assert [point.preset for point in points] == names

    def test_unknown_name_gets_similar_names(self) -> None:
        with pytest.raises(UsageError, match="did you mean aegaeon-fig11a"):
            preset_panels("aegaeon-fig-11a")


class TestOverrides:
    def test_replace_fields(self) -> None:
        wanted = Overrides(models=(3, 5), ttft_s=2.0, seed=7, duration_s=9.0, num_prefill=4)
        changed = panel("aegaeon-fig11a").changed(wanted)
        assert (changed.models, changed.seed, changed.duration_s) == ((3, 5), 7, 9.0)
        assert changed.targets == Targets(2.0, 0.1)
        assert changed.num_prefill == 4

    def test_another_box_has_no_prefill_devices_yet(self) -> None:
        fig11a = panel("aegaeon-fig11a")
        assert fig11a.changed(Overrides(box=parse_box("4xA10"))).num_prefill is None
        assert fig11a.changed(Overrides(box=parse_box("16xH800"))).num_prefill == 6

    def test_groups_of_another_size(self) -> None:
        box = panel("aegaeon-fig17-72b").changed(Overrides(tensor_parallel_size=8)).box
        assert (box.num_devices, box.name) == (1, "8xH800")

    @pytest.mark.parametrize(
        ("wanted", "axis"),
        [
            (Overrides(rps=(0.1, 0.2), models=(40,)), "rps"),
            (Overrides(models=(40, 70)), "models"),
            (Overrides(models=(40, 70), rps=(0.1, 0.2)), "models"),
        ],
    )
    def test_what_is_swept(self, wanted: Overrides, axis: str) -> None:
        assert poisson_panel().changed(wanted).axis == axis

    def test_two_sweeps_make_a_panel_of_each_rate(self) -> None:
        wanted = Overrides(policies=ONE_POLICY, models=(2, 3), rps=(0.1, 0.2))
        points = preset_points("aegaeon-fig11a", wanted)
        assert [point.preset for point in points] == [
            "aegaeon-fig11a rps=0.1",
            "aegaeon-fig11a rps=0.2",
        ] * 2

    def test_what_is_given_twice_is_run_once(self) -> None:
        wanted = Overrides(policies=ONE_POLICY * 2, models=(2, 2), rps=(0.1, 0.1))
        assert len(preset_points("aegaeon-fig11a", wanted)) == 1

    @pytest.mark.parametrize(
        ("wanted", "said"),
        [
            (Overrides(models=(0,)), "at least one"),
            (Overrides(models=(10**9,)), "at most"),
            (Overrides(rps=(0.0,)), "above 0"),
            (Overrides(rps=(float("nan"),)), "above 0"),
            (Overrides(num_prefill=16), "prefill"),
            (Overrides(num_prefill=0), "prefill"),
            (Overrides(tensor_parallel_size=5), "groups"),
            (Overrides(policies=("best",)), "no policy"),
        ],
    )
    def test_impossible_ones(self, wanted: Overrides, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            preset_points("aegaeon-fig11a", wanted)

    def test_a_fixed_burst_stays_as_it_is(self) -> None:
        [point] = preset_points("aegaeon-fig6", Overrides(policies=ONE_POLICY, models=(3,)))
        with pytest.raises(UsageError, match="fixed"):
            build_scenario(point)


class TestFamilies:
    def test_models_of_a_size_take_turns(self) -> None:
        wanted = Overrides(policies=ONE_POLICY, models=(12,), num_families=4)
        models = build_scenario(preset_points("aegaeon-fig11a", wanted)[0]).models
        found = [model.family for model in models.values()]
        # Three sizes in turn: the first has two families, each of the others one.
        numbers = [0, 1, 2, 3, 1, 2] * 2
        assert found == [f"family-{number}" for number in numbers]
        assert len({(model.family, model.weight_bytes) for model in models.values()}) == 4

    @pytest.mark.parametrize(
        ("preset", "num", "said"),
        [("aegaeon-fig11a", 2, "models of 3 sizes"), ("aegaeon-fig17-72b", 1, "not shared")],
    )
    def test_impossible_ones(self, preset: str, num: int, said: str) -> None:
        wanted = Overrides(policies=ONE_POLICY, num_families=num)
        with pytest.raises(UsageError, match=said):
            build_scenario(preset_points(preset, wanted)[0])


def test_engines_are_free_in_the_papers_figures_unless_wished() -> None:
    assert panel("aegaeon-fig11a").engines is None
    assert (
        panel("small-box").engines == poisson_panel().changed(Overrides(box=Box(4, "A10"))).engines
    )
    wishes = HostWishes(kv_host_bytes=1)
    changed = panel("aegaeon-fig11a").changed(Overrides(host_wishes=wishes))
    assert (changed.engines, changed.host.kv_bytes_per_gpu) == (None, 1)
    counted = changed.changed(Overrides(host_wishes=HostWishes(engine_bytes=7)))
    assert counted.engines is not None
    assert (counted.engines.num_bytes, counted.host.kv_bytes_per_gpu) == (7, 1)


class TestNamedModels:
    def test_each_has_dimensions_targets_and_a_rate_of_its_own(self) -> None:
        [point] = preset_points("small-box", Overrides(policies=("gpupool",)))
        scenario = build_scenario(point)
        assert {name: one.targets for name, one in scenario.models.items()} == {
            one.name: one.targets for one in SMALL_BOX
        }
        assert scenario.models["yi-9b"].weight_bytes > scenario.models["qwen-7b"].weight_bytes
        counts = Counter(one.model for one in scenario.requests)
        for one in SMALL_BOX:
            expected = one.rps * scenario.duration_s
            assert counts[one.name] == pytest.approx(expected, abs=4 * expected**0.5)

    def test_a_mean_rate_scales_all(self) -> None:
        policies = ("gpupool",)
        [usual] = preset_points("small-box", Overrides(policies=policies))
        [fast] = preset_points("small-box", Overrides(policies=policies, rps=(0.4,)))
        ratio = len(build_scenario(fast).requests) / len(build_scenario(usual).requests)
        assert ratio == pytest.approx(
            0.4 * len(SMALL_BOX) / sum(one.rps for one in SMALL_BOX), rel=0.1
        )

    def test_the_models_are_fixed(self) -> None:
        with pytest.raises(UsageError, match="models are fixed"):
            build_scenario(preset_points("small-box", Overrides(models=(3,)))[0])


class TestRecorded:
    def test_there_is_one_for_every_trace(self) -> None:
        assert set(RECORDED) >= {
            *("azure23-conv", "azure23-code", "mooncake-conv", "arena27", "servegen-4models"),
            *("servegen-market100", "azfunc19-200", "azfunc19-100", "aegaeon-synth"),
            *(f"aegaeon-synth-{scenario}" for scenario in SYNTH_SCENARIOS),
        }

    @pytest.mark.parametrize("name", RECORDED)
    def test_without_its_folder(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="GPUPOOL_WORKLOADS"):
            preset_points(name)
        with pytest.raises(UsageError, match=f"{tmp_path}.*no such file"):
            preset_points(name, Overrides(workloads_dir=tmp_path))

    def test_is_found_in_its_folder(self, tmp_path: Path) -> None:
        lines = [f"{second},m{second % 3},20,10" for second in range(10)]
        header = "arrival_s,model,prompt_tokens,output_tokens"
        write(tmp_path / "arena27_first5min.csv.gz", header, *lines)
        wanted = Overrides(policies=ONE_POLICY, workloads_dir=tmp_path)
        scenario = build_scenario(preset_points("arena27", wanted)[0])
        assert list(scenario.models) == ["m0", "m1", "m2"]
        assert (len(scenario.requests), scenario.duration_s) == (10, 9.0)


ASKS_NOTHING = Draw(None, None, None, 0)


class TestRecordedTrace:
    @pytest.fixture
    def unnamed(self, tmp_path: Path) -> RecordedTrace:
        lines = [f"{second},20,10" for second in range(101)]
        path = write(tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens", *lines)
        return RecordedTrace(str(path))

    def test_as_it_is(self, unnamed: RecordedTrace) -> None:
        drawn = unnamed.draw(ASKS_NOTHING)
        assert (len(drawn.requests), drawn.models, drawn.duration_s) == (101, ("model",), 100.0)

    def test_is_spread_over_models_by_popularity(self, unnamed: RecordedTrace) -> None:
        drawn = unnamed.draw(Draw(4, None, None, 0))
        counts = [sum(one.model == name for one in drawn.requests) for name in drawn.models]
        assert sum(counts) == 101
        assert counts[0] == max(counts)
        assert drawn == unnamed.draw(Draw(4, None, None, 0))
        assert drawn != unnamed.draw(Draw(4, None, None, 1))

    def test_a_window_begins_at_zero(self, unnamed: RecordedTrace) -> None:
        window = RecordedTrace(unnamed.file, window_s=(50.0, 60.0))
        drawn = window.draw(ASKS_NOTHING)
        assert [one.arrival_s for one in drawn.requests] == list(range(10))
        assert drawn.duration_s == 10.0
        with pytest.raises(UsageError, match="no requests between"):
            RecordedTrace(unnamed.file, window_s=(200.0, 300.0)).draw(ASKS_NOTHING)

    def test_time_stretched_to_a_rate(self, unnamed: RecordedTrace) -> None:
        drawn = unnamed.draw(Draw(2, 1.01, None, 0))
        assert drawn.duration_s == pytest.approx(50.0)
        assert drawn.requests[-1].arrival_s == pytest.approx(50.0)

    def test_cut_to_a_duration(self, unnamed: RecordedTrace) -> None:
        drawn = unnamed.draw(Draw(None, None, 5.0, 0))
        assert (len(drawn.requests), drawn.duration_s) == (5, 5.0)

    def test_named_models_are_folded(self, tmp_path: Path) -> None:
        header = "arrival_s,model,prompt_tokens,output_tokens"
        path = write(tmp_path / "t.csv", header, "0,a,1,1", "1,a,1,1", "2,b,1,1", "3,c,1,1")
        drawn = RecordedTrace(str(path)).draw(Draw(2, None, None, 0))
        assert drawn.models == ("m00", "m01")
        assert [one.model for one in drawn.requests] == ["m00", "m00", "m01", "m00"]

    def test_classes_of_size(self, tmp_path: Path) -> None:
        header = "arrival_s,model,prompt_tokens,output_tokens"
        kinds = ("c1-small", "c2-mid", "m-large", "c3-reason")
        path = write(tmp_path / "sizes.csv.gz", header, *(f"0,{kind},1,1" for kind in kinds))
        [point] = trace_panel(path).changed(Overrides(policies=ONE_POLICY)).points()
        models = build_scenario(point).models
        weights = [models[kind].weight_bytes for kind in kinds]
        assert weights == sorted(set(weights))
        assert point.preset == "sizes"


class TestFunctionCalls:
    @pytest.fixture
    def calls(self, tmp_path: Path) -> FunctionCalls:
        lines = ["9,f0,50", "10,f0,3", "10,f1,2", "12,f0,1", "13,f1,50"]
        return FunctionCalls(
            str(write(tmp_path / "f.csv", "minute,function,requests", *lines)), 10, num_minutes=3
        )

    def test_calls_stay_in_their_minute(self, calls: FunctionCalls) -> None:
        drawn = calls.draw(ASKS_NOTHING)
        assert (drawn.models, drawn.duration_s) == (("f0", "f1"), 180.0)
        minutes = [int(one.arrival_s // 60) for one in drawn.requests]
        assert minutes == [0, 0, 0, 0, 0, 2]
        assert drawn == calls.draw(ASKS_NOTHING)

    def test_an_empty_window(self, calls: FunctionCalls) -> None:
        with pytest.raises(UsageError, match="no calls"):
            FunctionCalls(calls.file, 100).draw(ASKS_NOTHING)
