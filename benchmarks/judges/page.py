"""The results file of the judges, and ``docs/internals/judge.md``, generated from the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.judges.verdicts import Outcome, Row, Verdict, differences

_HEAD = """\
# Outside judges

`make judge` runs tests of other projects for this API against gpupool and against `vllm serve`, \
both with the same tiny checkpoint on a CPU, and generates this page from \
[judge.json](../../benchmarks/results/judge/judge.json). Only differences count: a test that \
fails with both depends on the tiny model, the CPU, vLLM, or a choice of both (a request without \
a name goes to the only model; there is no `/v1/responses/compact`). A difference without a \
reason in `benchmarks/judges/known.py` makes `make judge` fail.

llm-comply, a package from PyPI, tests OpenAI's chat completions, Open Responses and Anthropic's \
messages against their specifications. vllm-tests are the tests of vLLM's source package that \
`benchmarks/judges/selection.py` names: none of vLLM's own metrics, command line and paths, of \
classes without a server, or of published models. The model is `tiny-trained` \
(`scripts/tiny_trained.py`).
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of all judges; ``absent`` has the reasons for judges that were left out."""

    rows: Sequence[Row]
    absent: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, report: Report) -> None:
    """Replace the results file; the judges are in the order of their names."""
    report = Report(sorted(report.rows, key=lambda row: (row.judge, row.test)), report.absent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(msgspec.to_builtins(report), indent=1, sort_keys=True) + "\n")


def read_report(path: Path) -> Report:
    """Read a results file; empty if there is none."""
    if not path.exists():
        return Report([])
    return msgspec.json.decode(path.read_bytes(), type=Report)


def page_text(report: Report) -> str:
    """Return the page."""
    lines = [_HEAD, *_summary(report.rows), "", *_differences(report.rows)]
    return "\n".join(lines) + "\n"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield "| judge | tests | pass with both | fail with both | skipped by both | differ |"
    yield "| - | - | - | - | - | - |"
    for judge in dict.fromkeys(row.judge for row in rows):
        mine = [row for row in rows if row.judge == judge]
        same = Counter(row.gpupool.outcome for row in mine if row.verdict is Verdict.SAME)
        counts = (same[one] for one in (Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED))
        cells = [judge, str(len(mine)), *map(str, counts), str(len(differences(mine)))]
        yield f"| {' | '.join(cells)} |"


def _differences(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Differences\n"
    found = differences(rows)
    if not found:
        yield "There are none."
        return
    yield "| judge | tests | gpupool | vllm serve | reason |"
    yield "| - | - | - | - | - |"
    by_reason = Counter(
        (row.judge, f"{row.gpupool.outcome} | {row.vllm.outcome} | {row.reason or '**none**'}")
        for row in found
    )
    for (judge, outcomes), count in by_reason.items():
        yield f"| {judge} | {count} | {outcomes} |"
