"""Write the figures of ``make bench-memory`` into ``docs/internals/memory.md``.

    python -m benchmarks.memory_table build/bench-memory.json

The table between two marks is replaced; all numbers come from the JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.values import value_text
from gpupoold.errors import UsageError

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "internals" / "memory.md"
_MARKED = re.compile(r"(?<=<!-- bench-memory -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> int:
    """Rewrite the page; exit code 2 when the report or the page is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="what `make bench-memory` wrote")
    parser.add_argument("--page", type=Path, default=_PAGE, help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        report = json.loads(arguments.report.read_text("utf-8"))
        page = rewritten(arguments.page.read_text("utf-8"), report)
    except (UsageError, OSError, ValueError, KeyError) as error:
        print(f"error: {arguments.report}, {arguments.page}: {error!r}", file=sys.stderr)
        return 2
    arguments.page.write_text(page, "utf-8")
    return 0


def rewritten(page: str, report: Mapping[str, Any]) -> str:
    """The page with the table as the report has it.

    Raises:
        UsageError: the page has no place for it.
        KeyError: the report has no figures.
    """
    if not _MARKED.search(page):
        raise UsageError("no `<!-- bench-memory -->` with an `<!-- end -->` after it")
    rows = [("figure", "measured", "limit", "reached"), ("-",) * 4]
    for name, figure in report["figures"].items():
        measured, limit = (value_text(name, figure[key]) for key in ("measured", "limit"))
        rows.append((f"`{name}`", measured, limit, "yes" if figure["reached"] else "**no**"))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return _MARKED.sub(lambda _: table, page)


if __name__ == "__main__":
    sys.exit(main())
