"""What the benchmarks make of their measurements. Their runs are functional tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from benchmarks.bench.cold import ColdStart, summary
from benchmarks.bench.loads import LoadRound, gaps_between, summary as load_summary
from benchmarks.bench.rig import device_config, make_checkpoints
from gpupoold.config.schema import parse_settings
from gpupoold.config.sections import CUDA_RESERVE_BYTES
from gpupoold.errors import Failed


class TestColdStart:
    def test_a_request_of_a_resident_model_is_not_part_of_it(self) -> None:
        start = ColdStart(warm_s=1.0, request_s=0.3, resident_request_s=0.1, plain_read_s=0.5)
        assert start.total_s == pytest.approx(1.2)
        assert ColdStart(1.0, 0.1, 0.2, 0.5).total_s == 1.0

    def test_the_limit_is_a_plain_read_and_a_switch(self) -> None:
        starts = [ColdStart(warm_s, 0.3, 0.1, 0.45) for warm_s in (1.0, 1.2, 3.0)]
        row = summary(starts, 1000, host_cached_limit_s=0.2)
        assert row["p50_s"] == pytest.approx(1.4)
        assert row["p99_s"] == pytest.approx(3.2)
        assert row["limit_s"] == pytest.approx(0.7)
        assert (row["samples"], row["bytes"], row["reached"]) == (3, 1000, False)


class TestLoads:
    def test_gaps_of_a_load_include_the_gap_in_which_it_begins(self) -> None:
        times_s = [0.0, 1.0, 2.5, 3.0, 4.0]
        assert gaps_between(times_s, 2.0, 3.0) == [1.5, 0.5]
        assert gaps_between(times_s, 0.0, 1.0) == [1.0]

    @pytest.mark.parametrize(("pause_s", "reached"), [(0.149, True), (0.16, False)])
    def test_the_limit_is_the_longest_pause_without_a_load_and_100_ms(
        self, pause_s: float, reached: bool
    ) -> None:
        rounds = [
            LoadRound([0.02, 0.05], [0.03, 0.1], alone_s=2.0, beside_s=4.0),
            LoadRound([0.02, 0.03], [0.03, pause_s], alone_s=1.0, beside_s=2.0),
        ]
        result = load_summary(rounds, 1000)
        assert result["undisturbed_pause_s"] == 0.05
        assert result["limit_s"] == pytest.approx(0.15)
        assert (result["pause_s"], result["reached"]) == (pause_s, reached)
        assert (result["load_alone_s"], result["load_beside_stream_s"]) == (1.5, 3.0)
        assert result["tokens_while_loading"] == 4


class TestRig:
    def test_the_device_has_so_much_for_models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpupoold.config.schema.NVIDIA_GPUS", Path("/nowhere"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        [device] = parse_settings(tomllib.loads(device_config(1 << 30)), "test").devices
        assert (device.kind, device.memory_bytes) == ("emulated", 1 << 30)

    def test_a_gpus_reserve_comes_on_top(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "0000:01:00.0").mkdir()
        monkeypatch.setattr("gpupoold.config.schema.NVIDIA_GPUS", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        [device] = parse_settings(tomllib.loads(device_config(1 << 30)), "test").devices
        assert (device.kind, device.page_bytes) == ("cuda", 2 << 20)
        assert device.memory_bytes == (1 << 30) + (256 << 20) + CUDA_RESERVE_BYTES

    def test_a_checkpoint_that_cannot_be_made_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(Failed, match=r"llama checkpoint could not be made: .*of weights"):
            make_checkpoints(tmp_path, ["llama"], 1000)
