"""How long the tests of each file take: recorded, printed, and used for order and shards.

``tests/durations.json`` has seconds by file, those of slow tests by themselves. Files run longest
first, so that no worker of xdist is left with a long file at the end; ``--shard 2/6`` runs one of
six parts of the slow tests, of about equal duration. A file that is longer than a part is dealt out
by test, to parts and to workers.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "durations.json"
_NUM_PRINTED = 20
_NUM_SHARDS = 6
# What a file without an entry counts as.
_UNRECORDED_S = 10.0

Durations = Mapping[str, float]


def longest_first(files: Iterable[str], durations: Durations) -> list[str]:
    """Return the files by recorded duration; those of equal duration in the given order."""
    return sorted(dict.fromkeys(files), key=lambda file: -durations.get(file, _UNRECORDED_S))


def shard_of(files: Iterable[str], durations: Durations, number: int, total: int) -> set[str]:
    """Return the files of shard ``number`` of 1 to ``total``.

    Each file, the longest first, goes to the shard that has the least so far.
    """
    shards: list[set[str]] = [set() for _ in range(total)]
    sums_s = [0.0] * total
    for file in longest_first(sorted(files), durations):
        least = sums_s.index(min(sums_s))
        shards[least].add(file)
        sums_s[least] += durations.get(file, _UNRECORDED_S)
    return shards[number - 1]


def longer_files(durations: Durations, total: int) -> set[str]:
    """Return the files that take longer than one of ``total`` equal parts of all."""
    limit_s = sum(durations.values()) / total
    return {file for file, seconds in durations.items() if seconds > limit_s}


def parts_of(tests: Sequence[str], durations: Durations, total: int) -> dict[str, float]:
    """Return the seconds of what shards are made of: files, or tests of files longer than a shard.

    ``tests`` are the tests' ids.
    """
    num_tests = Counter(test.partition("::")[0] for test in tests)
    files_s = {file: durations.get(file, _UNRECORDED_S) for file in num_tests}
    longer = longer_files(files_s, total)
    parts_s = {file: seconds for file, seconds in files_s.items() if file not in longer}
    for test in tests:
        file = test.partition("::")[0]
        if file not in parts_s:
            parts_s[test] = files_s[file] / num_tests[file]
    return parts_s


def read_record(path: Path = RECORD) -> dict[str, dict[str, float]]:
    """Return seconds by file for ``test`` and for ``slow``, the tests with that marker."""
    found: dict[str, dict[str, float]] = json.loads(path.read_text("utf-8"))
    return found


def merged(
    before: Mapping[str, Durations], measured: Mapping[str, Durations]
) -> dict[str, dict[str, float]]:
    """Return the record with the measured files in place of what was recorded of these."""
    return {
        kind: {
            file: round(seconds, 1)
            for file, seconds in sorted({**before[kind], **measured.get(kind, {})}.items())
            if (ROOT / file).is_file()
        }
        for kind in before
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--record-durations`` and ``--shard``."""
    group = parser.getgroup("durations")
    group.addoption(
        "--record-durations",
        action="store_true",
        help=f"write how long each file took to {RECORD.relative_to(ROOT)}",
    )
    group.addoption(
        "--shard", type=_shard, metavar="N/TOTAL", help="run this part of the slow tests alone"
    )


def _shard(text: str) -> tuple[int, int]:
    number, _, total = text.partition("/")
    if number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total):
        return int(number), int(total)
    raise ValueError(text)


def pytest_configure(config: pytest.Config) -> None:
    """Measure and order the tests of this session."""
    config.pluginmanager.register(_Durations(config), "durations-of-files")


class _Durations:
    """Selects and orders a session's tests; sums their durations, of all xdist workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._shard: tuple[int, int] | None = config.getoption("--shard")
        self._is_recording: bool = config.getoption("--record-durations")
        self._measured_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._recorded = read_record()
        self._num_shards = self._shard[1] if self._shard else _NUM_SHARDS

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave the tests of the shard, and put the longest files first."""
        if self._shard is not None:
            self._keep_shard(config, items, *self._shard)
        expected_s: dict[str, float] = {}
        for kind in {_kind(item.keywords) for item in items}:
            for file, seconds in self._recorded[kind].items():
                expected_s[file] = expected_s.get(file, 0.0) + seconds
        order = longest_first(map(_file_of, items), expected_s)
        places = {file: place for place, file in enumerate(order)}
        items.sort(key=lambda item: places[_file_of(item)])

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Let both workers share the tests of a file that is dealt out by test."""
        from xdist.scheduler import LoadFileScheduling

        longer = longer_files(self._recorded["slow"], self._num_shards)

        class ByFileOrTest(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file = super()._split_scope(nodeid)
                return nodeid if file in longer else file

        return ByFileOrTest(config, log) if config.getvalue("dist") == "loadfile" else None

    def _keep_shard(
        self, config: pytest.Config, items: list[pytest.Item], number: int, total: int
    ) -> None:
        slow = [item for item in items if _kind(item.keywords) == "slow"]
        parts_s = parts_of([item.nodeid for item in slow], self._recorded["slow"], total)
        shard = shard_of(parts_s, parts_s, number, total)
        kept = {item for item in slow if shard & {item.nodeid, _file_of(item)}}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a test's set-up, call or tear-down to those of its file."""
        file = report.nodeid.partition("::")[0]
        self._measured_s[_kind(report.keywords)][file] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest files; write the record where that was asked for."""
        sums_s: dict[str, float] = defaultdict(float)
        for durations in self._measured_s.values():
            for file, seconds in durations.items():
                sums_s[file] += seconds
        if len(sums_s) > 1:
            terminalreporter.section("slowest files")
            for file in longest_first(sums_s, sums_s)[:_NUM_PRINTED]:
                terminalreporter.write_line(f"{sums_s[file]:8.1f} s  {file}")
        if self._is_recording:
            record = merged(self._recorded, self._measured_s)
            RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def _kind(keywords: Mapping[str, object] | Sequence[str]) -> str:
    return "slow" if "slow" in keywords else "test"


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
