"""Loads of a plan: Poisson, traces, recorded requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpupoold.domain import RequestRecord
from gpupoold.errors import UsageError
from gpupoold.latency.models import LinearDecode
from gpupoold.sim.planner.load import (
    PoissonLoad,
    admit,
    busiest,
    history_load,
    poisson_load,
    recorded_load,
    trace_load,
)
from gpupoold.sim.planner.plan import make_plan
from gpupoold.sim.workloads import SimRequest
from tests.unit.sim.planner.questions import arrivals, question


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
            RequestRecord("", "a", 1000.0, None, None, 5, 6, 0, "stop", 1.0),
            RequestRecord("", "a", 990.0, None, None, 7, 8, 0, "stop", 1.0),
            RequestRecord("", "a", 995.0, None, None, 7, 0, 0, "stop", 1.0),
            RequestRecord("", "gone", 991.0, None, None, 7, 8, 0, "stop", 1.0),
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
            with pytest.raises(UsageError, match=r"^no request arrives in 60s"):
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
