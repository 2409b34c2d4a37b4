"""The script that makes the packaged fits, on a grid made from known laws."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from gpupoold.latency.models import DecodeBatch, LinearDecode, PrefillModel
from gpupoold.latency.profiles import parse
from gpupoold.latency.shape import builtin_shape
from scripts.fit_profiles import main

PREFILL = PrefillModel.of(builtin_shape("Qwen-7B")).with_constants((4e-13, 2e-11, 0.009))
DECODE = LinearDecode(4e-7, 1.5e-4, 0.012)
AEGAEON = ["set", "model", "gpu", "tp", "input_tokens", "batch"]
AEGAEON += ["prefill_ms_p50", "decode_step_ms_p50", "suspect"]
SPLITWISE = ["model", "gpu", "tp", "prompt_tokens", "batch", "output_tokens"]
SPLITWISE += ["prefill_ms", "decode_step_ms", "e2e_ms"]


def grid(model: str, prefill_factor: float = 1.0) -> list[list[object]]:
    rows: list[list[object]] = []
    for length in (16, 64, 256, 1024):
        for batch in (1, 4, 16):
            prefill_ms = PREFILL.predict_s([length] * batch) * 1e3
            decode_ms = DECODE.predict_s(DecodeBatch(batch, batch * (length + 5))) * 1e3
            rows.append(["profiles", model, "A100", 1, length, batch, prefill_ms, decode_ms, 0])
            if prefill_factor != 1.0 and batch == 4:
                rows[-1][6] = prefill_ms * prefill_factor
    return rows


def write_grids(folder: Path, aegaeon: list[list[object]]) -> None:
    with gzip.open(folder / "aegaeon_prefill_decode.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows([AEGAEON, *aegaeon])
    with (folder / "splitwise_prefill_decode.csv").open("w", newline="") as file:
        csv.writer(file).writerow(SPLITWISE)


def run(folder: Path) -> int:
    return main(["--profiles", str(folder), "--output", str(folder / "out.csv")])


def test_known_laws_are_found_and_suspect_rows_left_out(tmp_path: Path) -> None:
    suspect: list[object] = ["profiles", "qwen_7b", "A100", 1, 4096, 16, 1.0, 999.0, 1]
    write_grids(tmp_path, [*grid("qwen_7b"), suspect])
    assert run(tmp_path) == 0
    (profile,) = parse((tmp_path / "out.csv").read_text().splitlines())
    assert (profile.gpu, profile.model, profile.licence) == ("A100-80", "Qwen-7B", "Apache-2.0")
    assert profile.prefill.law.constants == pytest.approx(PREFILL.constants, rel=1e-4)
    assert profile.decode.law.constants == pytest.approx(DECODE.constants, rel=1e-4)
    assert profile.decode.quality.num_points == 12


def test_a_bad_fit_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_grids(tmp_path, grid("qwen_7b", prefill_factor=8.0))
    assert run(tmp_path) == 1
    assert "left out: ('A100-80', 'Qwen-7B', 1): prefill" in capsys.readouterr().err
    assert parse((tmp_path / "out.csv").read_text().splitlines()) == ()
