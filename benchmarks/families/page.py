"""Generation of ``docs/models.md`` from the results of the checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from benchmarks.families.cells import COLUMNS, Cell, Outcome, Row
from benchmarks.families.family import Family
from benchmarks.families.transformers_backend import TRANSFORMERS_BACKEND

_HEAD = """\
# Families of models

The families below answer in gpupool as in vLLM alone, token by token. `make models-table` checks \
all and generates this page from [families.json](../benchmarks/results/models/families.json), \
which has the figures; `python -m benchmarks.models --only FAMILY` checks some. Other families are \
not excluded: see [what is refused](adding-models.md#what-is-refused).

Each family has a tiny checkpoint with random weights and the structure of the family. Two real \
workers on emulated devices, too small for all families, are compared with vLLM alone, in float32 \
unless another dtype is named. *Equal* are all of these checks, unless the cell says otherwise:

| check | what is compared with vLLM alone |
| - | - |
| serve | three prompts of 20 to 150 tokens, alone; another worker loads from the snapshot |
| switch | all prompts of all families at once, while weights and KV leave the device and return |
| KV | an answer whose KV and state move to the host and back; the bytes are equal too |
| migrate | an answer that moves to the other worker |
| resume | an answer that continues on the other worker after `kill -9` of the first |

- *Parsers* are found in the family's real chat template (`tests/templates`), if at hand.
- Pooling models return numbers, which may differ by 0.00001, and are checked without KV and \
migrate. Two of the three prompts of a vision model have an image.
- Both sides use the adaptations of vLLM's CPU build in `gpupoold/worker/engine/cpu_build.py`, \
which GPUs do not need. Without the corrected rotary embedding, MLA models, LFM2 and LFM2-MoE \
answer wrongly in vLLM 0.32 alone.
- "One request at a time": tokens depend on other requests of a step in vLLM alone. "vLLM alone \
without prefix cache": the prefill fails in vLLM's CPU build with the prefix cache, and not in \
gpupool.
- "Transformers": vLLM runs the family with the modules of Transformers, with the numbers of heads \
from config.json. A model whose projections make other numbers is refused in its self-check.
"""
_GROUPS = """\
Both workers are [groups](internals/groups.md) of {num_gpus} emulated GPUs, and vLLM alone has a \
tensor parallelism of {num_gpus} (`python -m benchmarks.models --gpus {num_gpus}`, figures in \
[groups-{num_gpus}.json](../benchmarks/results/models/groups-{num_gpus}.json)). "Resume" kills \
the process of the last rank. Equal in all columns: {equal}."""
_TITLES = {"kv": "KV"}
_SIGNS = {Outcome.NO: "**no**", Outcome.VLLM_CANNOT: "vLLM cannot"}


def page_text(
    families: Sequence[Family], rows: Mapping[str, Row], of_groups: Mapping[int, Mapping[str, Row]]
) -> str:
    """Return the page; families without a row are not listed.

    ``of_groups`` has the rows of groups by the number of GPUs.
    """
    lines = [_HEAD, *_table(families, rows)]
    lines += _reasons("Not right yet", families, rows, Outcome.NO)
    lines += _reasons("What vLLM cannot", families, rows, Outcome.VLLM_CANNOT)
    for num_gpus, found in of_groups.items():
        title = f"On groups of {num_gpus} GPUs"
        equal = _equal_families([one for one in families if one.name in rows], found)
        head = _GROUPS.format(num_gpus=num_gpus, equal=equal)
        lines += ["", f"## {title}", "", head]
        lines += _reasons(f"{title}: not right yet", families, found, Outcome.NO)
        lines += _reasons(f"{title}: what vLLM cannot", families, found, Outcome.VLLM_CANNOT)
    return "\n".join(lines).rstrip() + "\n"


def _equal_families(families: Sequence[Family], rows: Mapping[str, Row]) -> str:
    """Return the families that are equal, or all but the untried and different, if fewer."""
    equal = [one.title for one in families if _is_equal(rows.get(one.name))]
    others = [one.title for one in families if one.title not in equal]
    if len(others) < len(equal):
        return f"all but {'; '.join(others)} (not tried, or below)" if others else "all"
    return "; ".join(equal) or "none"


def _is_equal(row: Row | None) -> bool:
    """Whether a family was tried and no check has failed, for gpupool's reason or vLLM's."""
    bad = (Outcome.NO, Outcome.VLLM_CANNOT)
    return row is not None and all(cell.outcome not in bad for cell in row.cells.values())


def _table(families: Sequence[Family], rows: Mapping[str, Row]) -> list[str]:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for family in families:
        if family.name in rows:
            cells = rows[family.name].cells
            name = family.title + (f" ({family.dtype})" if family.dtype != "float32" else "")
            backend = ", Transformers" if family in TRANSFORMERS_BACKEND else ""
            kind = f"{family.mechanism}{backend}", _equal(cells), _parsers(cells.get("parsers"))
            alike.setdefault(kind, []).append(name)
    head = [_line(["families", "mechanism", "equal", "parsers"]), _line(["-"] * 4)]
    return head + [_line(["; ".join(names), *kind]) for kind, names in alike.items()]


def _equal(cells: Mapping[str, Cell]) -> str:
    """Return "all", notes of checks that are equal, or the checks that are not."""
    checks = {name: cells[name] for name in COLUMNS if name in cells and name != "parsers"}
    for outcome, sign in _SIGNS.items():
        if failed := [_title(name) for name, cell in checks.items() if cell.outcome is outcome]:
            return f"{sign}: {', '.join(failed)}"
    # Figures of the checks, such as "6 blocks", are in the results.
    equal = [cell for cell in checks.values() if cell.outcome is Outcome.YES]
    notes = dict.fromkeys(one.text for one in equal if not re.search(r"\d", one.text))
    return "; ".join(filter(None, notes)) or "all"


def _parsers(cell: Cell | None) -> str:
    if cell is None or cell.outcome is Outcome.UNTRIED:
        return ""
    return cell.text if cell.outcome is Outcome.YES else _SIGNS[cell.outcome]


def _title(column: str) -> str:
    return _TITLES.get(column, column)


def _reasons(
    title: str, families: Sequence[Family], rows: Mapping[str, Row], outcome: Outcome
) -> list[str]:
    """Return a section with the reasons of an outcome, one line per family and reason."""
    lines = []
    for family in families:
        if family.name not in rows:
            continue
        reasons: dict[str, list[str]] = {}
        for column in COLUMNS:
            cell = rows[family.name].cells.get(column)
            if cell is not None and cell.outcome is outcome:
                reasons.setdefault(cell.text, []).append(_title(column))
        for text, columns in reasons.items():
            lines.append(f"- {family.title}, {', '.join(columns)}: {_plain(text)}")
    return ["", f"## {title}", "", *lines] if lines else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Return an error's text as code, in one line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
