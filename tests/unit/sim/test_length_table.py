"""The script that makes the built-in length table, run as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpupoold.sim.lengths import SHAREGPT_TABLE, read_package_table, read_table

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "make_length_table.py"


def run(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--from", str(source), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_quantiles_of_the_unscaled_scenarios(tmp_path: Path) -> None:
    rows = [f"n1_r1_in1_out1,{1000 - n},{n}" for n in range(1, 1002 - 2)]
    rows += ["n1_r1_in2_out1,5000,1", "other_in1_out1,500,500"]  # scaled; a repeated pair
    source, out = tmp_path / "source.csv", tmp_path / "table.csv"
    source.write_text("scenario,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    done = run(source, out)
    assert done.returncode == 0, done.stderr
    table = read_table(out)
    by_quantile = {row.cells[0]: row.cells[1:] for row in table.rows}
    assert by_quantile["0"] == ["1", "1"]
    assert by_quantile["0.5"] == ["500", "500"]
    assert by_quantile["1"] == ["999", "999"]
    assert "999 distinct" in out.read_text()
    assert "Apache-2.0" in out.read_text()
    assert len(table.rows) == len(read_package_table(SHAREGPT_TABLE).rows)


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path / "missing.csv", tmp_path / "out.csv")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "missing.csv: cannot be read" in done.stderr
    assert not (tmp_path / "out.csv").exists()
