"""Traces: files, complaints with their place, scaling, renaming, folding."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from pathlib import Path

import pytest

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import Lengths, read_table, select_scenario
from gpupoold.sim.traces import (
    DEFAULT_MODEL,
    fold_models,
    scale_time,
    spread,
    trace_requests,
)
from gpupoold.sim.workloads import SimRequest, poisson_workload

HEADER = "arrival_s,model,prompt_tokens,output_tokens\n"
LENGTHS = Lengths(10, 20)


def load_trace(
    path: Path, *, scenario: str | None = None, default_model: str = DEFAULT_MODEL
) -> tuple[SimRequest, ...]:
    return trace_requests(select_scenario(read_table(path), scenario), default_model)


def written(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_trace(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, HEADER + "0,b,12,3\n0.25,a,1,99\n0.25,b,7,1\n", name)
    assert load_trace(path) == (
        SimRequest("r0", "b", 0.0, 12, 3),
        SimRequest("r1", "a", 0.25, 1, 99),
        SimRequest("r2", "b", 0.25, 7, 1),
    )


def test_columns_in_any_order_others_ignored_the_model_optional(tmp_path: Path) -> None:
    text = 'output_tokens, user ,arrival_s,prompt_tokens\r\n4,"a,b",1.5e0,3\r\n'
    path = written(tmp_path, "\ufeff" + text)
    assert load_trace(path) == (SimRequest("r0", "model", 1.5, 3, 4),)
    assert load_trace(path, default_model="chat")[0].model == "chat"


def test_empty_lines_and_comments_are_skipped_but_counted(tmp_path: Path) -> None:
    text = '# made by "hand"\n' + HEADER + "\n0,a,1,1\n# half\n\n0,a,1,none\n"
    with pytest.raises(UsageError, match="line 7, column output_tokens: 'none' is not"):
        load_trace(written(tmp_path, text))


SCENARIOS = "scenario," + HEADER + "x,5,a,1,1\ny,0,a,2,2\nx,6,b,3,3\n"


def test_a_scenario_is_a_trace_by_itself(tmp_path: Path) -> None:
    path = written(tmp_path, SCENARIOS)
    assert [one.prompt_tokens for one in load_trace(path, scenario="x")] == [1, 3]
    assert [one.id for one in load_trace(path, scenario="y")] == ["r0"]
    only = written(tmp_path, "scenario," + HEADER + "x,5,a,1,1\n")
    assert len(load_trace(only)) == 1


def test_scenarios_that_cannot_be_had(tmp_path: Path) -> None:
    path = written(tmp_path, SCENARIOS)
    with pytest.raises(UsageError, match=r"t.csv: several scenarios, name one \(known: x, y\)"):
        load_trace(path)
    with pytest.raises(UsageError, match=r"t.csv: no scenario 'z' \(known: x, y\)"):
        load_trace(path, scenario="z")
    many = "".join(f"s{number},0,a,1,1\n" for number in range(30))
    with pytest.raises(UsageError, match="s19 and 10 more"):
        load_trace(written(tmp_path, "scenario," + HEADER + many))
    with pytest.raises(UsageError, match="no column scenario, so no scenario 'x'"):
        load_trace(written(tmp_path, HEADER + "0,a,1,1\n"), scenario="x")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t.csv: empty, expected a header line"),
        ("# only a comment\n", "t.csv: empty, expected a header line"),
        (HEADER, "t.csv: has a header and no requests"),
        ("arrival_s,model\n0,a\n", r"line 1: no column prompt_tokens, output_tokens \(the col"),
        ("# note\narrival_s,prompt_tokens\n", "line 2: no column output_tokens"),
        ("arrival_s,arrival_s\n", "line 1: column 'arrival_s' appears twice"),
        (HEADER + "0,a,1\n", "line 2: 3 cells, expected 4"),
        (HEADER + "0,a,1,1,1\n", "line 2: 5 cells, expected 4"),
        (HEADER + "0,a,1,1\n2,a,1,1\n1.5,a,1,1\n", "line 4, column arrival_s: 1.5 comes after 2"),
        (HEADER + "-1,a,1,1\n", "line 2, column arrival_s: -1 is negative"),
        (HEADER + "soon,a,1,1\n", "line 2, column arrival_s: 'soon' is not a number"),
        (HEADER + "nan,a,1,1\n", "line 2, column arrival_s: 'nan' is not a number"),
        (HEADER + "1e999,a,1,1\n", "line 2, column arrival_s: '1e999' is not a number"),
        (HEADER + "1_0,a,1,1\n", "line 2, column arrival_s: '1_0' is not a number"),
        (HEADER + ",a,1,1\n", "line 2, column arrival_s: empty"),
        (HEADER + "0, ,1,1\n", "line 2, column model: empty"),
        (HEADER + "0,a,0,1\n", "line 2, column prompt_tokens: 0 is less than 1"),
        (HEADER + "0,a,1,-3\n", "line 2, column output_tokens: -3 is less than 1"),
        (HEADER + "0,a,1,2.0\n", "line 2, column output_tokens: '2.0' is not a whole number"),
        (HEADER + f"0,a,1,{'9' * 5000}\n", "line 2, column output_tokens: '9+' is not a whole"),
        (HEADER + f'0,"{"x" * 200_000}",1,1\n', "line 2: field larger than field limit"),
    ],
)
def test_what_is_wrong_and_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as raised:
        load_trace(written(tmp_path, text))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"plain text", "cannot be read: Not a gzipped file"),
        (gzip.compress(b"x" * 1000)[:-12], "cannot be read: Compressed file ended"),
        (gzip.compress(b"")[:10] + b"\xff" * 30, "cannot be read: Error -3"),
    ],
    ids=["plain", "cut", "garbage"],  # its header has the time
)
def test_broken_compressed_files(tmp_path: Path, raw: bytes, problem: str) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=problem):
        load_trace(path)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing.csv: cannot be read: No such file"):
        load_trace(tmp_path / "missing.csv")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_trace(tmp_path)
    with pytest.raises(UsageError, match=r"not UTF-8 text \(byte 3\)"):
        load_trace(written(tmp_path, b"abc\xff\n"))


def workload() -> tuple[SimRequest, ...]:
    return poisson_workload({"a": 8.0, "b": 2.0}, 1_000.0, LENGTHS, seed=2)


def test_scaled_time() -> None:
    requests = workload()
    half = scale_time(requests, 0.5)
    assert [one.arrival_s * 2 for one in half] == [one.arrival_s for one in requests]
    assert [one.id for one in half] == [one.id for one in requests]


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf])
def test_factors_must_be_positive(factor: float) -> None:
    with pytest.raises(UsageError, match=r"time factor .*: must be above 0"):
        scale_time(workload(), factor)


def models(*names: str) -> tuple[SimRequest, ...]:
    return tuple(SimRequest(f"r{n}", name, float(n), 1, 1) for n, name in enumerate(names))


def test_folded_models_are_dealt_out_by_number_of_requests() -> None:
    requests = models("c", "c", "c", "b", "b", "d", "a")
    assert [one.model for one in fold_models(requests, 2)] == [
        *("m00", "m00", "m00"),  # c, the busiest
        *("m01", "m01"),  # b
        "m01",  # d comes after a
        "m00",
    ]
    assert {one.model for one in fold_models(requests, 1)} == {"m00"}
    assert len({one.model for one in fold_models(requests, 9)}) == 4
    with pytest.raises(UsageError, match="0 models"):
        fold_models(requests, 0)


def test_spread_models_have_zipf_shares() -> None:
    counts = Counter(one.model for one in spread(models(*"a" * 11_000), ("x", "y", "z"), seed=1))
    assert [counts[name] for name in "xyz"] == pytest.approx([6000, 3000, 2000], rel=0.05)
