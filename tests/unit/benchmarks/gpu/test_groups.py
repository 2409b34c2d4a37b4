"""Pieces for groups of GPUs: which machine runs them, on how many GPUs, and what they report."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import machine, results
from benchmarks.gpu.group_start import topology_figures
from benchmarks.gpu.group_streams import phase_figures
from benchmarks.gpu.group_tokens import token_figures
from benchmarks.gpu.overhead import PLAN, on_group, stream_figures
from benchmarks.gpu.pieces import PIECES, Piece, group_size, why_too_few
from benchmarks.gpu.rig import Report, Setting
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.switch import switch_figures
from benchmarks.load import Ask, Stream
from gpupoold.config.sections import CUDA_RESERVE_BYTES
from gpupoold.doctor.facts import Gpu, GpuFacts, GpuLink, PciPath

MIB = 1 << 20
GROUPS = [piece for piece in PIECES if piece.num_groups]


def piece(num_groups: int) -> Piece:
    return Piece("a", ("module",), 20.0, 0.1, num_groups=num_groups)


@pytest.mark.parametrize(
    ("num_groups", "num_gpus", "size"),
    [
        *((1, count, size) for count, size in ((1, 0), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8))),
        *((2, count, size) for count, size in ((2, 0), (3, 0), (4, 2), (7, 2), (8, 4), (16, 8))),
        (0, 0, 1),
        (0, 8, 1),
    ],
)
def test_groups_are_as_large_as_the_machine_allows(
    num_groups: int, num_gpus: int, size: int
) -> None:
    assert group_size(piece(num_groups), num_gpus, is_emulated=False) == size
    assert group_size(piece(num_groups), num_gpus, is_emulated=True) == (2 if num_groups else 1)


def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, dry: str | None) -> Any:
    monkeypatch.setattr(machine, "hardware", lambda: {"gpu": None})
    monkeypatch.setattr(machine, "versions", dict)
    monkeypatch.setattr(machine, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = 'import json, sys\nout = sys.argv[sys.argv.index("--out") + 1]\n'
    text += 'open(out, "w").write(json.dumps({"details": {"words": sys.argv}}))\n'
    (tmp_path / "module.py").write_text(text)
    return Runner(tmp_path / "out", tmp_path / "scratch", 100.0, dry_kind=dry)


def test_a_machine_with_one_gpu_skips_all_of_them_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(tmp_path, monkeypatch, 1, None)
    made.run(GROUPS, [])
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["pieces"]
    assert kept.keys() == {one.name for one in GROUPS}
    for one in GROUPS:
        assert kept[one.name]["outcome"] == results.SKIPPED
        assert kept[one.name]["problem"] == why_too_few(one, 1)
    assert kept["group-migration"]["problem"] == "needs 4 NVIDIA GPUs, and this machine has 1"
    assert kept["group-start"]["problem"] == "needs 2 NVIDIA GPUs, and this machine has 1"
    assert not results.has_failed(made.results)


@pytest.mark.parametrize(("dry", "num_gpus", "size"), [(None, 4, "4"), ("emulated", 0, "2")])
def test_a_piece_is_told_the_size_of_its_group(
    dry: str | None, num_gpus: int, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(tmp_path, monkeypatch, num_gpus, dry)
    made.run([piece(1)], [])
    words = made.results["pieces"]["a"]["details"]["words"]
    assert words[words.index("--gpus") + 1] == size


def setting(num_gpus: int, *, is_emulated: bool) -> Setting:
    return Setting("a", is_emulated, is_emulated, Path(), Report(Path()), 0.0, num_gpus)


def test_gpus_of_a_group_share_the_bytes_and_no_gpu_is_in_two_groups() -> None:
    devices = tomllib.loads(setting(4, is_emulated=False).device(400 * MIB, 0, 2))["device"]
    assert [one["gpus"] for one in devices] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {one["memory"] for one in devices} == {1124 * MIB + CUDA_RESERVE_BYTES}
    [emulated] = tomllib.loads(setting(2, is_emulated=True).device(400 * MIB, 0))["device"]
    assert (emulated["gpus"], emulated["memory"]) == (2, 200 * MIB)


def test_figures_name_the_size_of_the_group() -> None:
    assert setting(1, is_emulated=False).label("8B") == "8B"
    assert setting(4, is_emulated=False).label("8B") == "group4_8B"


def test_a_groups_switch_is_held_against_the_slowest_ranks_copies() -> None:
    row = {"p50_s": 0.42, "bytes": 8e9, "kv_bytes": 0, "memcpy_p50_s": 0.32}
    modes = {"host_cached": {"without_kv": row}}
    found = switch_figures("group2_8B", modes, is_group=True)["group2_8B_host_cached_switch_p50_s"]
    assert found["limit"] == pytest.approx(1.3 * 0.32 + 0.005)
    assert found["reached"]
    late = {"host_cached": {"without_kv": row | {"p50_s": 0.422}}}
    found = switch_figures("group2_8B", late, is_group=True)["group2_8B_host_cached_switch_p50_s"]
    assert not found["reached"]


class TestOverhead:
    def test_vllm_has_as_many_gpus_and_three_numbers_of_streams(self) -> None:
        plan = on_group(PLAN, 4)
        assert plan.vllm_options[-2:] == ("--tensor-parallel-size", "4")
        assert sorted((plan.num_streams, *plan.more_streams)) == [1, 16, 64]
        assert [plan.prompts_of(count) for count in (1, 16, 64)] == [2, 32, 128]

    def test_each_number_of_streams_has_a_ratio(self) -> None:
        rates = {server: {"tokens_per_s": 100.0} for server in ("gpupool", "vllm")}
        rows = {1: rates | {"tokens_per_s_ratio": 0.96}, 64: rates | {"tokens_per_s_ratio": 0.94}}
        found = stream_figures("group2_8B", rows, 0.95)
        assert found["group2_8B_with_1_streams_decode_ratio"]["reached"]
        assert not found["group2_8B_with_64_streams_decode_ratio"]["reached"]
        assert len(found) == 6


def stream(prompt: int, *tokens: int) -> Stream:
    return Stream(Ask("m", prompt, 2), list(tokens))


def test_one_token_that_differs_is_a_missed_figure() -> None:
    theirs = [stream(0, 1, 2), stream(1, 3, 4)]
    same = token_figures("t", [stream(1, 3, 4), stream(0, 1, 2)], theirs, 1)
    assert all(figure["reached"] for figure in same.values())
    other = token_figures("t", [stream(0, 1, 9), stream(1, 3)], theirs, 0)
    assert other["t_answers_differing"]["measured"] == 2
    assert other["t_answers_incomplete"]["measured"] == 1
    assert not other["t_switches"]["reached"]


def test_streams_may_lose_no_request() -> None:
    measured = {
        "requests": 9,
        "completed": 8,
        "differing_texts": 0,
        "pages_leaked": 0,
        "longest_pause_p50_s": None,
    }
    found = phase_figures("group2_kills", measured)
    assert not found["group2_kills_requests_lost"]["reached"]
    assert "group2_kills_longest_pause_p50_s" not in found


FACTS = GpuFacts(
    gpus=(Gpu("H100", 1, 0, uuid="GPU-a"), Gpu("H100", 1, 0, uuid="GPU-b"), Gpu("H100", 1, 0)),
    links=(GpuLink(0, 1, 18, True), GpuLink(0, 2, 0, path=PciPath.NODE), GpuLink(1, 2)),
)


def test_the_topology_is_that_of_the_gpus_in_use() -> None:
    assert topology_figures("g", FACTS, 2)["g_nvlinks"]["measured"] == 18
    assert topology_figures("g", FACTS, 3)["g_nvlinks"]["measured"] == 0
    assert topology_figures("g", GpuFacts("no driver"), 2) == {}
    assert machine.link_row(FACTS.links[1]) == {
        "gpus": [0, 2],
        "num_nvlinks": 0,
        "is_switched": False,
        "path": "node",
    }


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("0,2", 2), ("1", 1), ("", 0), ("GPU-b,GPU-a", 2)]
)
def test_only_visible_gpus_count(visible: str | None, count: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.num_gpus(environment, FACTS) == count
