#!/usr/bin/env python3
"""Make the simulator's built-in length table from the traces of the Aegaeon artifact.

    scripts/make_length_table.py --from aegaeon_synth.csv.gz

The input has the columns prompt_tokens and output_tokens. With a column scenario, only scenarios
with unscaled lengths count. Scenarios share requests, so each (prompt, output) pair counts once.
The same input gives the same table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpupoold.errors import UsageError  # noqa: E402
from gpupoold.sim.lengths import (  # noqa: E402  # noqa: E402
    OUTPUT,
    PROMPT,
    QUANTILE,
    SCENARIO,
    SHAREGPT_TABLE,
    CsvTable,
    length_pairs,
    read_table,
)

DATA = ROOT / "gpupoold" / "sim" / "data"
UNSCALED = "_in1_out1"
# Every hundredth, and smaller steps towards the long tail.
PER_MILLE = [*range(0, 990, 10), 990, 992, 994, 996, 998, 999, 1000]
NOTICE = """\
# Token lengths of single-turn ShareGPT conversations: quantiles, prompt and output each by
# itself (in the source they are uncorrelated), rounded to whole tokens. Of {num_pairs} distinct
# pairs with mean prompt {prompt_mean:.1f} and mean output {output_mean:.1f}.
# Made by scripts/make_length_table.py from the traces synth-*-1.0-1.0.csv of the artifact of
# "Aegaeon: Effective GPU Pooling for Concurrent LLM Serving on the Market" (Xiang et al.,
# SOSP 2025): MachineLearningSystem/25SOSP-Aegaeon @ 1c3b110, aegaeon/sim/simdata.
# Licence of the source: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, default=DATA / SHAREGPT_TABLE, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        text = table_text(read_table(options.source))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    options.out.write_text(text, encoding="utf-8")
    return 0


def table_text(source: CsvTable) -> str:
    """Return the text of the table made from ``source``, with the licence notice."""
    if SCENARIO in source.columns:
        rows = [row for row in source.rows if source.text(row, SCENARIO).endswith(UNSCALED)]
        source = replace(source, rows=rows)
    pairs = sorted(set(length_pairs(source)))
    if not pairs:
        raise UsageError(f"{source.name}: no lengths in it")
    prompts, outputs = (sorted(column) for column in zip(*pairs, strict=True))
    notice = NOTICE.format(
        num_pairs=len(pairs),
        prompt_mean=sum(prompts) / len(pairs),
        output_mean=sum(outputs) / len(pairs),
    )
    lines = [f"{QUANTILE},{PROMPT},{OUTPUT}"] + [
        f"{share / 1000:g},{quantile(prompts, share)},{quantile(outputs, share)}"
        for share in PER_MILLE
    ]
    return notice + "\n".join(lines) + "\n"


def quantile(ordered: Sequence[int], per_mille: int) -> int:
    """Return a quantile, interpolated linearly between two values."""
    index, rest = divmod(per_mille * (len(ordered) - 1), 1000)
    if not rest:
        return ordered[index]
    return round(ordered[index] + (ordered[index + 1] - ordered[index]) * rest / 1000)


if __name__ == "__main__":
    sys.exit(main())
