"""The pictures of the README show headings, columns and steps that today's programs print."""

from __future__ import annotations

import html
import io
import re
from datetime import UTC
from pathlib import Path
from typing import get_args

from rich.console import Console

from examples.demo import act_one, act_two
from gpupool_tui.compose import compose
from gpupool_tui.text import UNICODE, plain
from gpupool_tui.view import View
from gpupoold.event_kinds import EventKind
from tests.conftest import ROOT
from tests.unit.gpupool_tui.pictures import picture

_CELL = re.compile(r'<text[^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
_CELL_WIDTH = 12.2
_WORD = re.compile(r"[A-Za-z]{3,}")


def lines_of(path: Path) -> list[str]:
    """Return the lines of text of a terminal's picture."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in _CELL.findall(path.read_text(encoding="utf-8")):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text)))
    lines = []
    for _, cells in sorted(rows.items()):
        line = ""
        for x, text in sorted(cells):
            line = line.ljust(round(x / _CELL_WIDTH)) + text.replace("\xa0", " ")
        lines.append(line.rstrip())
    return lines


def words(text: str) -> set[str]:
    return set(_WORD.findall(text))


def _is_heading(line: str) -> bool:
    return bool(line.strip()) and not re.search(r"[\d─]", re.sub("p50|p99", "", line))


def sources_of_demo() -> str:
    files = [*(ROOT / "examples" / "demo").glob("*.py"), ROOT / "cli" / "gpupool_cli" / "why.py"]
    files.append(ROOT / "gpupoold" / "control" / "views" / "explain.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def reports_of_demo() -> str:
    printed = io.StringIO()
    console = Console(file=printed, width=88)
    row = dict.fromkeys(("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s"), 1.0)
    stages = dict.fromkeys(("total", "evict", "map", "weights", "kv"), 0.1)
    one = {
        "requests": 32,
        "completed": 32,
        "differing_tokens": 0,
        "switches": 12,
        "bytes_moved": 1,
        "seconds": 1.0,
        "switch_seconds": stages,
        "models": {"tiny-llama": {"requests": 8, "tokens": 512, "attainment": 1.0, **row}},
    }
    pauses = {"requests": 3, "without_kill_s": 1.0, "from_kill_s": 1.0}
    two = {
        "requests": 6,
        "completed": 6,
        "differing_tokens": 0,
        "worker_back_s": 1.0,
        "answers": {act_two.ON_KILLED: pauses, act_two.ELSEWHERE: pauses},
        "hit": ["x"],
    }
    assert act_one.report(console, one)
    assert act_two.report(console, two)
    return printed.getvalue()


def test_the_demo_prints_what_its_picture_shows() -> None:
    lines = lines_of(ROOT / "docs" / "demo.svg")
    end = next(index for index, line in enumerate(lines) if line.startswith("8. "))
    shown = "\n".join(lines[:end])
    reports = reports_of_demo()
    models = words("tiny llama mixtral qwen")
    assert words(shown) - models <= words(reports) | words(sources_of_demo()) | {"GiB", "MiB"}
    headings = [line.split() for line in reports.splitlines() if _is_heading(line)]
    assert len(headings) > 6
    assert [one for one in headings if one not in [line.split() for line in lines]] == []
    # Answers moved from the killed process to another.
    assert re.search(r"device \d → \d", shown)
    assert re.search(r"the killed one +[1-6] ", shown)


def test_top_has_the_columns_of_its_picture() -> None:
    lines = lines_of(ROOT / "docs" / "top.svg")
    width = max(map(len, lines))
    today = [plain(line) for line in compose(picture(), View(UNICODE, UTC), width, 40).lines]
    for first in (" DEV", " MODEL ", " REQUEST ", " TIME "):
        [in_picture] = [line for line in lines if line.startswith(first)]
        [now] = [line for line in today if line.startswith(first)]
        assert in_picture.split() == now.split()
    titles = [line for line in lines if re.match("─[1-5] ", line)]
    assert [words(title) & words("\n".join(today)) for title in titles]
    assert [title.split()[1] for title in titles] == [
        line.split()[1] for line in today if re.match("─[1-5] ", line)
    ]
    assert words(lines[-1]) <= words(today[-1])


def test_ids_and_events_of_the_picture_of_top_exist() -> None:
    lines = lines_of(ROOT / "docs" / "top.svg")
    begin = next(index for index, line in enumerate(lines) if line.startswith("─4 "))
    end = next(index for index, line in enumerate(lines) if line.startswith("─5 "))
    ids = [line.split()[0] for line in lines[begin + 2 : end]]
    assert ids
    assert all(re.fullmatch(r"▸?[0-9a-f]{32}(-\d+)?", one) for one in ids)
    kinds = {line.split()[2] for line in lines[end + 2 : -1] if line.split()}
    assert kinds <= {name for kind in get_args(EventKind) for name in get_args(kind)}
    assert not any("hollow" in line for line in lines)
