"""Generate ``docs/performance.md`` from the results of runs on GPUs in ``benchmarks/results``.

    python -m benchmarks.gpu.report

The page links every number to its file and contains measured figures only. Results of dry runs,
of machines without a GPU and of the fake card are refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import results
from benchmarks.values import value_text
from gpupoold.errors import GpupoolError, Refused
from gpupoold.units import format_bytes
from tests import fake_card

_ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = _ROOT / "benchmarks" / "results"
PAGE = _ROOT / "docs" / "performance.md"

_HEAD = """\
# Performance on GPUs

`python -m benchmarks.gpu.report` generates this page from the files in \
[benchmarks/results](../benchmarks/results/README.md), whose README says how to measure. Figures \
of emulated devices are in [memory](internals/memory.md).
"""
_NOTHING = "Nothing has been measured on a GPU yet."

_SECTIONS = (
    (
        "Groups of GPUs",
        r"^group\d",
        "Models on several GPUs with tensor parallelism; names begin with the number of GPUs. A "
        "switch may take 1.3 plain copies of the same bytes on all ranks at once, and 5 ms; bytes "
        "and rates are those of a GPU. `decode_ratio` compares with vLLM on as many GPUs.",
    ),
    (
        "Switching between models",
        r"_switch_|_sleep_|_wake_|_weights_copy_",
        "Two models of equal size on one GPU. `host_cached`: one model is evicted and the other is "
        "copied from host memory; the limit is the bytes at 0.9 of the speed of copies in the same "
        "run (KV at 0.8) and 100 ms. `prefetched`: the model was copied during the other model's "
        "turn; the limit is 50 ms. `resident`: both models are on the device; the limit is 5 ms. "
        "`sleep` and `wake` are vLLM's own operations (level 1), in a separate process with the "
        "same checkpoint; together they should take at least three times as long as a switch.",
    ),
    (
        "A thousand switches",
        r"^switches",
        "Streams of models that do not fit together on the device. Every answer is compared, token "
        "by token, with the answer to the same prompt alone.",
    ),
    (
        "Beside vLLM alone",
        r"_decode_ratio|_(gpupool|vllm)_t|_ttft_p50_difference",
        "One model through gpupool and through `vllm serve` with default settings, in turn. "
        "`decode_ratio` is the median over the rounds of the ratios of tokens per second.",
    ),
    (
        "Many models",
        r"^mixed_",
        "Ten 8B models with FP8 weights (91 GB) on 48 GB of one GPU, targets of 3 s to the first "
        "token and 50 ms between tokens, and a real trace of 27 models folded onto ten, replayed "
        "at increasing speed. `attainment` is the share of tokens in time, in all phases together "
        "and at the rate of each phase (of all models together); `goodput` is the rate at which "
        "attainment falls below 0.9. `simulated_difference` is the largest difference of a phase's "
        "attainment from the simulator's, on the same arrivals and with the measured latencies.",
    ),
    (
        "KV of paused requests",
        r"kv_",
        "`kv_swap`: a model's KV out and in, compared with plain copies. `hidden`: the share of "
        "the transfer's time that does not slow another model's steps. By layout: a request's "
        "blocks out and in, contiguous or scattered, with layers or with blocks outermost.",
    ),
    (
        "Copies",
        r"^(pinned|queue)_",
        "Copies between pinned host memory and the device. `pinned`: plain copies. `queue`: copies "
        "by the transfer queues, in batches, beside an engine's work; the limit is 0.9 of the "
        "speed of plain copies.",
    ),
    (
        "Mapping",
        r"^(map|unmap|create|allow_access)_",
        "A gigabyte mapped with access and unmapped, by page size; and the single calls of the "
        "driver.",
    ),
    ("Tests", r"^gpu_tests_", "The tests marked `gpu`."),
    ("Other figures", r"", ""),
)


def load(folder: Path) -> dict[str, Any]:
    """Return all results by file name.

    Raises:
        Refused: a file is of a dry run, of a machine without a GPU, of the fake card, or of another
            format.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        one = json.loads(path.read_text("utf-8"))
        if one.get("format") != results.FORMAT:
            raise Refused(f"{path.name} has format {one.get('format')}", "measure again")
        gpu = one["hardware"]["gpu"]
        if one["is_dry_run"] or not gpu or gpu["name"] == fake_card.NAME:
            raise Refused(f"{path.name} was not measured on a GPU", f"remove it from {folder}")
        found[path.name] = one
    return found


def page(found: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    if not found:
        return "\n".join([*parts, f"{_NOTHING}\n"])
    parts.append("\n".join(_machines(found)))
    left = {number: _figures(one) for number, one in enumerate(found.values(), 1)}
    for title, pattern, text in _SECTIONS:
        rows = list(_rows(left, pattern))
        if rows:
            parts.append("\n".join(filter(None, [f"## {title}\n", f"{text}\n" if text else ""])))
            parts.append(
                "\n".join(_table(("figure", "measured", "limit", "reached", "file"), rows))
            )
    parts.append("\n".join(_unmeasured(found)))
    return "\n".join(part for part in parts if part)


def _figures(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**results.figures_of(one), **one["derived"]}


def _rows(left: Mapping[int, dict[str, Any]], pattern: str) -> Iterator[Sequence[str]]:
    """Yield the rows of a section, and remove their figures from ``left``."""
    for number, figures in left.items():
        for name in [name for name in figures if re.search(pattern, name)]:
            figure = figures.pop(name)
            limit = "" if figure["limit"] is None else value_text(name, figure["limit"])
            reached = {None: "", True: "yes", False: "**no**"}[figure["reached"]]
            yield f"`{name}`", value_text(name, figure["measured"]), limit, reached, str(number)


def _machines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## Machines\n"
    files: dict[tuple[str, ...], list[str]] = {}
    for number, (file, one) in enumerate(found.items(), 1):
        hardware, versions = one["hardware"], one["versions"]
        gpu = hardware["gpu"]
        link = [f"PCIe {gpu['pcie_generation']} x{gpu['pcie_width']}"]
        link = link if gpu["pcie_generation"] and gpu["pcie_width"] else []
        machine = (
            ", ".join([gpu["name"], format_bytes(gpu["memory_bytes"]), *link]),
            f"{hardware['cpu']}, {hardware['cores']} cores, "
            f"{format_bytes(hardware['memory_bytes'])}",
            f"driver {gpu['driver']}, torch {versions['torch']}, vLLM {versions['vllm']}",
        )
        link_text = f"{number}: {_link(file)} at {one['commit']}"
        files.setdefault(machine, []).append(link_text)
    rows = [(", ".join(links), *machine) for machine, links in files.items()]
    yield from _table(("files at commits", "GPU", "host", "versions"), rows)


def _unmeasured(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the pieces that did not end, or did not begin for lack of time."""
    outcomes = (results.FAILED, results.TIMED_OUT, results.NO_TIME)
    rows = [
        (name, piece["outcome"], str(number))
        for number, one in enumerate(found.values(), 1)
        for name, piece in one["pieces"].items()
        if piece["outcome"] in outcomes
    ]
    if rows:
        yield "## Incomplete pieces\n"
        yield "Pieces without an end. Figures measured before are in the tables above.\n"
        yield from _table(("piece", "outcome", "file"), rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (titles, ["-"] * len(titles), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def _link(file: str) -> str:
    return f"[{file.removesuffix('.json')}](../benchmarks/results/{file})"


def main() -> int:
    """Rewrite the page; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    args = parser.parse_args()
    try:
        args.page.write_text(page(load(args.results)), "utf-8")
    except GpupoolError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
