"""Plans: the same numbers as the simulator's, the least number of devices, tried advice only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.models import LinearDecode
from gpupoold.latency.shape import builtin_shape
from gpupoold.latency.stored import StoredFit, StoredLatency
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.planner.changes import next_round
from gpupoold.sim.planner.file import read_models
from gpupoold.sim.planner.load import (
    PoissonLoad,
    RecordedRequest,
    admit,
    busiest,
    history_load,
    poisson_load,
    recorded_load,
    trace_load,
)
from gpupoold.sim.planner.models import PlannedModel, place, read_checkpoint
from gpupoold.sim.planner.notes import notes_on
from gpupoold.sim.planner.plan import Plan, PlanQuestion, check_question, make_plan, models_below
from gpupoold.sim.planner.run import Runner, Setup
from gpupoold.sim.presets import poisson_panel
from gpupoold.sim.run import run_point
from gpupoold.sim.scenario import Overrides
from gpupoold.sim.workloads import SimRequest

SMALL_SHAPES = ("Yi-1.5-6B", "Qwen2.5-7B", "Llama-2-7B")


def question(
    devices: str, num_models: int, rps: float, targets: Targets | None = None, **changes: object
) -> PlanQuestion:
    """Small models with Poisson arrivals for two minutes."""
    box = parse_box(devices)
    targets = targets or Targets()
    models = box_models(box, num_models, targets, SMALL_SHAPES)
    asked = PlanQuestion(
        box,
        models,
        poisson_load(dict.fromkeys(models, rps), 120.0),
        0.99,
        models_on=lambda other: box_models(other, num_models, targets, SMALL_SHAPES),
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tight() -> tuple[PlanQuestion, Plan]:
    """A box that is too small for its load."""
    asked = question("1xA10", 8, 0.15)
    return asked, make_plan(asked)


class TestPlan:
    def test_the_simulator_says_the_same(self) -> None:
        wanted = Overrides(
            policies=("gpupool",), models=(4,), rps=(0.2,), box=parse_box("1xH800"), duration_s=60.0
        )
        [point] = poisson_panel().changed(wanted).points()
        row = run_point(point)
        box = parse_box("1xH800")
        models = box_models(box, 4, Targets())
        load = poisson_load(dict.fromkeys(models, 0.2), 60.0)
        setup = Setup(box, models, load, seeds=(0,))
        assert Runner().attained(setup, "").overall == row["attainment"]
        shown = Runner().forecast(setup)
        assert shown.num_requests == row["requests"]
        assert shown.overall.ttft_s.p99 == row["ttft_p99_s"]

    def test_a_box_that_is_large_enough(self) -> None:
        plan = make_plan(question("4xA10", 3, 0.05))
        assert plan.fits
        assert plan.needed is not None
        assert plan.needed < 4
        assert plan.changes == ()
        assert plan.growth is not None
        assert plan.growth >= 1
        assert plan.growth_limit is None or plan.growth_limit > plan.growth

    def test_the_least_number_of_devices(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        assert not plan.fits
        assert plan.growth is None
        assert plan.needed is not None
        by_count = {one.num_devices: one.attained for one in plan.counts}
        assert by_count[plan.needed].reaches(asked.target)
        assert not by_count[plan.needed - 1].reaches(asked.target)
        assert by_count[1] == plan.attained

    def test_every_advice_was_simulated(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        enough = [one for one in plan.changes if one.attained.reaches(asked.target)]
        kinds = list(dict.fromkeys(one.kind for one in plan.changes))
        assert kinds == ["tbt", "ttft", "move", "load", "link", "gpu", "devices"]
        more = next(one for one in enough if one.kind == "devices")
        assert more.num_devices == plan.needed
        bigger = replace(asked, box=replace(asked.box, num_devices=more.num_devices))
        assert make_plan(bigger).attained == more.attained

    def test_it_repeats(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        assert make_plan(asked) == plan
        assert make_plan(replace(asked, seeds=(5, 6))).attained != plan.attained

    def test_every_run_must_reach_the_target(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        assert len(plan.attained.by_run) == 2
        low, high = sorted(plan.attained.by_run)
        assert low < high
        between = make_plan(replace(asked, target=(low + high) / 2))
        assert not between.fits

    def test_targets_out_of_reach(self) -> None:
        plan = make_plan(question("1xA10", 2, 0.1, Targets(10.0, 0.005)))
        assert not plan.fits
        assert plan.needed is None
        assert plan.counts[-1].num_devices <= 16
        assert not any(one.attained.reaches(0.99) for one in plan.changes)

    def test_a_larger_box_than_any_that_is_tried(self) -> None:
        asked = question("300xA10", 1, 1.0, Targets(0.01, 0.001))
        plan = make_plan(replace(asked, load=recorded_load(arrivals(0, model="m00"), "mine")))
        assert not plan.fits
        assert plan.needed is None
        assert [one.num_devices for one in plan.counts] == [300]

    def test_a_change_that_takes_all_requests_away_is_left_out(self) -> None:
        load = recorded_load(arrivals(*[0.01 * i for i in range(60)], model="m00"), "mine")
        plan = make_plan(question("1xA10", 2, 1.0, Targets(0.5, 0.02), load=load))
        assert not plan.fits
        kinds = {one.kind for one in plan.changes}
        assert "load" in kinds
        assert "move" not in kinds

    def test_the_latest_runs_are_not_run_again(self) -> None:
        asked = question("1xH800", 2, 0.1)
        runner = Runner()
        setup = Setup(asked.box, asked.models, asked.load, asked.seeds)
        attained = runner.attained(setup, "")
        assert runner.forecast(setup).overall.attainment == attained.overall
        assert runner.num_runs == 2
        runner.attained(replace(setup, load=asked.load.scaled(2)), "")
        assert runner.num_runs == 4
        assert runner.attained(setup, "") == attained
        assert runner.num_runs == 6

    def test_progress_reports(self) -> None:
        reported: list[tuple[str, int]] = []
        plan = make_plan(
            question("1xH800", 2, 0.1), lambda what, done: reported.append((what, done))
        )
        assert reported[0] == ("policy gpupool", 0)
        counts = [done for _, done in reported]
        assert counts == sorted(counts)
        assert counts[-1] < plan.num_runs

    def test_notes(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        models = [PlannedModel(name, Targets(), 1, 1) for name in asked.models]
        notes = notes_on(asked, plan, dict.fromkeys(asked.models, "scaled"), models)
        assert f"decided by {plan.forecast.num_requests} simulated requests: 2 runs" in notes[0]
        scaled = "all models: not measured on A10, but scaled from other models or GPUs"
        assert any(scaled in note for note in notes)


class TestPolicies:
    def test_the_best_comes_first_with_its_split(self) -> None:
        asked = question("4xA10", 4, 0.1, policies=("aegaeon", "gpupool"))
        plan = make_plan(asked)
        first, second = plan.policies
        assert first.attained.worst >= second.attained.worst
        assert plan.attained == first.attained
        [aegaeon] = [one for one in plan.policies if one.policy == "aegaeon"]
        base = Setup(asked.box, asked.models, asked.load, asked.seeds, "aegaeon")
        splits = {
            count: Runner().attained(replace(base, num_prefill=count, seeds=(0,)), "").worst
            for count in (1, 2, 3)
        }
        assert aegaeon.num_prefill == max(splits, key=lambda count: splits[count])

    def test_refusals(self) -> None:
        plan = make_plan(question("1xA10", 3, 0.02, policies=("static", "aegaeon", "gpupool")))
        assert plan.policies[0].policy == "gpupool"
        refused = {one.policy: one.attained.refused for one in plan.policies[1:]}
        assert "models fit" in refused["static"]
        assert "two devices" in refused["aegaeon"]
        with pytest.raises(UsageError, match="aegaeon cannot run here: needs two devices"):
            make_plan(question("1xA10", 3, 0.02, policies=("aegaeon",)))

    @pytest.mark.parametrize("target", [0.0, -1.0, 1.01, float("nan")])
    def test_impossible_targets(self, target: float) -> None:
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            check_question(target, ("gpupool",))

    def test_unknown_policy(self) -> None:
        with pytest.raises(UsageError, match="no policy is named 'best'"):
            check_question(0.99, ("best",))


class TestModels:
    def planned(self, shape_name: str = "Qwen2.5-7B", **changes: object) -> PlannedModel:
        shape = builtin_shape(shape_name)
        model = PlannedModel("one", Targets(), shape.weight_bytes, shape.kv_bytes_per_token, shape)
        return replace(model, **changes)  # type: ignore[arg-type]

    def measured(self, device: str) -> StoredLatency:
        prefill = StoredFit("LinearPrefill", (1e-4, 0.01), 0.99, 0.03, 0.07, 9)
        decode = StoredFit("LinearDecode", (1e-7, 1e-4, 0.03), 0.99, 0.03, 0.07, 9)
        return StoredLatency(device, "0.32.0", "bfloat16", 1.75e9, 2e10, prefill, decode)

    def test_what_was_measured_belongs_to_its_device(self) -> None:
        model = self.planned(measured=self.measured("NVIDIA A10"))
        here = place([model], parse_box("2xA10"))
        assert here.basis == {"one": "measured"}
        assert here.models["one"].latency.prefill_s([100]) == pytest.approx(0.02)
        assert place([model], parse_box("2xH800")).basis == {"one": "published"}
        assert place([model], parse_box("2xL40S")).basis == {"one": "scaled"}
        assert place([model], parse_box("4xA10", 4)).basis == {"one": "scaled"}
        emulated = self.planned(measured=self.measured("CPU x 2"))
        assert place([emulated], parse_box("A10")).basis == {"one": "published"}

    def test_without_dimensions_only_where_it_was_measured(self) -> None:
        model = self.planned(
            shape=None, shape_problem="it is gone", measured=self.measured("NVIDIA A10")
        )
        assert place([model], parse_box("A10")).basis == {"one": "measured"}
        with pytest.raises(
            UsageError, match="step times on H800 need the model's dimensions: it is gone"
        ):
            place([model], parse_box("H800"))

    def test_too_large(self) -> None:
        large, small = self.planned("Llama-3.1-70B", name="big"), self.planned()
        with pytest.raises(UsageError) as caught:
            place([large, small, replace(large, name="twin")], parse_box("4xA10"))
        assert caught.value.message == (
            "big weighs 141 GB, 119 GB too much; twin weighs 141 GB, 119 GB too much: "
            "one A10 can hold 21.7 GB (90 % of the memory), so these models do not fit at all"
        )
        assert "quantized" in caught.value.hint
        with pytest.raises(UsageError) as caught:
            place([large], parse_box("4xH800"))
        assert "--groups auto" in caught.value.hint
        assert place([large], parse_box("4xH800", 4)).models["big"].weight_bytes > 141e9

    def test_names(self) -> None:
        with pytest.raises(UsageError, match="'one' is named 2 times"):
            place([self.planned(), self.planned()], parse_box("A10"))
        with pytest.raises(UsageError, match="no models"):
            place([], parse_box("A10"))


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


class TestCheckpoints:
    def test_a_configuration_alone(self, tmp_path: Path) -> None:
        known = read_checkpoint(write_config(tmp_path / "a"))
        assert known.shape == builtin_shape("Llama-3.1-8B")
        assert known.weight_bytes == known.shape.weight_bytes

    def test_32_bits_are_served_in_16(self, tmp_path: Path) -> None:
        folder = write_config(tmp_path / "a", torch_dtype="float32")
        assert read_checkpoint(folder).shape.dtype_bytes == 2
        assert read_checkpoint(folder, "float32").shape.dtype_bytes == 4

    def test_weights_are_counted(self, tiny_models: dict[str, Path]) -> None:
        folder = tiny_models["tiny-llama"]
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        known = read_checkpoint(folder, "float32")
        assert known.weight_bytes == pytest.approx(stored, rel=0.01)
        assert read_checkpoint(folder).weight_bytes == known.weight_bytes // 2

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, "cannot be read: No such file"),
            ("{", "Expecting property name"),
            ("[]", "not a JSON object"),
            ('{"hidden_size": 64}', "missing key num_attention_heads"),
        ],
    )
    def test_bad_configurations(self, tmp_path: Path, text: str | None, said: str) -> None:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=said) as caught:
            read_checkpoint(tmp_path)
        assert str(tmp_path) in caught.value.message


class TestFile:
    def read(self, folder: Path, text: str) -> tuple[PlannedModel, ...]:
        path = folder / "models.toml"
        path.write_text(text)
        return read_models(path)

    def test_everything(self, tmp_path: Path) -> None:
        write_config(tmp_path / "llama")
        chat, first, second = self.read(
            tmp_path,
            """
            [[model]]
            name = "chat"
            shape = "Qwen2.5-7B"
            ttft = "2s"
            tbt = 0.05
            rps = 1
            weights = "5GB"
            max_len = 4096
            [[model]]
            name = "tune"
            path = "llama"
            count = 2
            """,
        )
        assert chat.targets == Targets(2.0, 0.05)
        assert (chat.rps, chat.weight_bytes, chat.max_len) == (1.0, 5_000_000_000, 4096)
        assert (first.name, second.name) == ("tune-0", "tune-1")
        assert first.targets == Targets()
        assert first.shape == builtin_shape("Llama-3.1-8B")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "names no models"),
            ("model = 3", "names no models"),
            ("models = []", "unknown key 'models'"),
            ("[[model]", "is not TOML"),
            ("model = [1]", r"model 1: must be a \[\[model\]\] table"),
            ('[[model]]\nshape = "Qwen2.5-7B"', "model 1: name: is missing"),
            ('[[model]]\nname = "a"', "model 1: needs either shape or path"),
            ('[[model]]\nname = "a"\nshape = "x"\npath = "y"', "either shape or path"),
            ('[[model]]\nname = "a"\nshape = "x"', "model 1: shape: no built-in shape 'x'"),
            ('[[model]]\nname = "a"\npath = "nowhere"', "nowhere/config.json: cannot be read"),
            ('[[model]]\nname = "a"\nspeed = 1', "unknown key 'speed'"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nrps = -1', "rps: -1 requests/s"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nrps = nan', "rps: nan requests/s"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nrps = "1"', "rps: '1' is not a number"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nttft = "0s"', "ttft: '0s' must be more"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\ntbt = "fast"', "tbt: 'fast' is not a dur"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\ncount = 0', "count: 0 is not a whole"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\ncount = 99999', "count: at most"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nweights = "big"', "weights: 'big' is not"),
            ('[[model]]\nname = "a"\nshape = "Qwen-7B"\nmax_len = 1.5', "max_len: 1.5 is not"),
            ('[[model]]\nname = 7\nshape = "Qwen-7B"', "name: 7 is not a text"),
        ],
    )
    def test_what_is_wrong(self, tmp_path: Path, text: str, said: str) -> None:
        with pytest.raises(UsageError, match=said) as caught:
            self.read(tmp_path, text)
        assert str(tmp_path) in caught.value.message

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            read_models(tmp_path / "none.toml")


def arrivals(*times_s: float, model: str = "a") -> tuple[SimRequest, ...]:
    return tuple(SimRequest(f"r{i}", model, at_s, 10, 20) for i, at_s in enumerate(times_s))


class TestLoad:
    def test_few_requests_take_longer_and_many_shorter(self) -> None:
        assert poisson_load({"a": 1.0}).duration_s == 600
        assert poisson_load({"a": 10.0}).duration_s == 300
        assert poisson_load({"a": 0.1}).duration_s == 2400
        assert poisson_load({"a": 1e-6}).duration_s == 4 * 3600
        assert poisson_load({"a": 1.0}, 7.0).duration_s == 7
        with pytest.raises(UsageError, match="'a': rate -1 requests/s"):
            poisson_load({"a": -1.0})

    def test_growing_and_leaving_out(self) -> None:
        load = PoissonLoad({"a": 0.5, "b": 0.5}, 400.0)
        assert len(load.scaled(2).draw(0)) == pytest.approx(2 * len(load.draw(0)), rel=0.2)
        only = [(one.arrival_s, one.prompt_tokens) for one in load.draw(0) if one.model == "b"]
        assert [(o.arrival_s, o.prompt_tokens) for o in load.without("a").draw(0)] == only
        recorded = recorded_load(arrivals(0, 2, 4), "mine")
        assert [one.arrival_s for one in recorded.scaled(2).draw(0)] == [0, 1, 2]
        assert recorded.scaled(2).duration_s == 2
        assert recorded.without("a").draw(0) == ()

    def test_the_busiest_stretch(self) -> None:
        requests = arrivals(0, 100, 101, 102, 500)
        assert [one.arrival_s for one in busiest(requests, 3.0)] == [100, 101, 102]
        load = recorded_load(requests, "mine", 3.0)
        assert [one.arrival_s for one in load.draw(9)] == [0, 1, 2]
        assert load.duration_s == 3
        assert load.text == "1 requests/s (mine, the busiest 3s of 8.33m)"
        assert not load.is_random
        assert recorded_load(requests, "mine").duration_s == 500
        late = tuple(replace(one, arrival_s=one.arrival_s + 1000) for one in requests)
        assert recorded_load(late, "mine", 3.0) == load

    def test_history(self) -> None:
        records = [
            RecordedRequest("a", 1000.0, 5, 6),
            RecordedRequest("a", 990.0, 7, 8),
            RecordedRequest("a", 995.0, 7, 0),
            RecordedRequest("gone", 991.0, 7, 8),
        ]
        load, left_out = history_load(records, ["a", "b"])
        drawn = load.draw(0)
        assert [(one.arrival_s, one.output_tokens) for one in drawn] == [(0, 8), (10, 6)]
        assert left_out == 2
        with pytest.raises(UsageError, match="recorded no requests"):
            history_load(records, ["b"])

    def test_a_trace(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_text("arrival_s,model,prompt_tokens,output_tokens\n5,a,1,2\n6,b,3,4\n")
        assert [one.arrival_s for one in trace_load(path, ["a", "b"]).draw(0)] == [0, 1]
        with pytest.raises(UsageError, match="asks for b, not among"):
            trace_load(path, ["a"])

    def test_a_trace_without_models(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        rows = "".join(f"{i},1,2\n" for i in range(200))
        path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
        load = trace_load(path, ["a", "b"])
        assert load.is_random
        assert {one.model for one in load.draw(0)} == {"a", "b"}
        assert load.draw(0) == load.draw(0) != load.draw(1)
        assert {one.model for one in trace_load(path, ["only"]).draw(0)} == {"only"}

    def test_limits(self) -> None:
        short, long, longest = (
            SimRequest("0", "a", 0, 10, 20),
            SimRequest("1", "a", 0, 10, 100),
            SimRequest("2", "a", 0, 50, 1),
        )
        admitted = admit([short, long, longest], {"a": 50})
        assert admitted.requests == (short, replace(long, output_tokens=40))
        assert (admitted.num_refused, admitted.num_cut) == (1, 1)

    def test_pooling_models_have_one_result(self) -> None:
        asked = [SimRequest("0", "p", 0, 10, 20), SimRequest("1", "a", 0, 10, 20)]
        admitted = admit(asked, {"a": 50, "p": 50}, {"p"})
        assert [one.output_tokens for one in admitted.requests] == [1, 20]
        assert admitted.num_cut == 0

    def test_a_model_without_kv_and_decode_steps(self) -> None:
        zero = LinearDecode()
        asked = question("1xH800", 2, 1.0)
        models = {
            name: replace(
                model,
                kv_bytes_per_token=0,
                generates=False,
                latency=replace(model.latency, decode=zero),
            )
            if name == "m00"
            else model
            for name, model in asked.models.items()
        }
        plan = make_plan(replace(asked, models=models, models_on=None))
        assert plan.attained.overall == pytest.approx(1.0, abs=0.05)
        assert plan.forecast.models["m00"].gaps_in_time is None
        assert plan.forecast.models["m01"].gaps_in_time is not None

    def test_nothing_arrives(self) -> None:
        asked = question("1xH800", 1, 0.0001)
        for policy in ("gpupool", "static"):
            with pytest.raises(UsageError, match=r"^no request arrives in 2m"):
                make_plan(replace(asked, policies=(policy,)))

    def test_every_request_is_too_long(self) -> None:
        asked = question("1xH800", 1, 1.0, max_lens={"m00": 1})
        with pytest.raises(UsageError, match="every prompt is too long for the model"):
            make_plan(asked)

    def test_a_recorded_load_is_run_once(self) -> None:
        load = recorded_load(arrivals(0, 2, 4, model="m00"), "mine")
        plan = make_plan(question("1xH800", 2, 1.0, load=load))
        assert len(plan.attained.by_run) == 1
        assert set(plan.forecast.models) == {"m00"}


@pytest.mark.parametrize(
    ("value", "after"), [(10.0, 15.0), (0.1, 0.15), (0.05, 0.075), (0.09, 0.1), (8.0, 10.0)]
)
def test_round_values(value: float, after: float) -> None:
    assert next_round(value) == pytest.approx(after)


def test_the_worst_models_come_first(tight: tuple[PlanQuestion, Plan]) -> None:
    _, plan = tight
    below = models_below(plan.forecast, 2.0)
    shares = [plan.forecast.models[name].attainment or 0.0 for name in below]
    assert shares == sorted(shares)
    assert len(below) == len(plan.forecast.models)
