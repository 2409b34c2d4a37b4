"""The figures that ``make bench-memory`` writes, made of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import COUNT_LIMITS, make_figures
from benchmarks.memory_streams import Answers, heap_gained, num_differing, summary
from benchmarks.memory_table import rewritten
from benchmarks.report import at_least, at_most, table
from gpupoold.domain import Switch
from gpupoold.errors import UsageError

LEFT = {
    "pages": 240,
    "free_pages": 240,
    "kv_host_bytes": 0,
    "anon_bytes": 400 << 20,
    "shmem_bytes": 50 << 20,
}


def details(**changes: Any) -> dict[str, Any]:
    row = {"p50_s": 0.001, "p99_s": 0.004, "limit_s": 0.002, "limit_of": "p99_s"}
    cold = {"p50_s": 0.8, "p99_s": 0.9, "limit_s": 1.0, "limit_of": "p50_s"}
    usual: dict[str, Any] = {
        "switch": {"modes": {"resident": {"without_kv": row, "with_kv": row}, "cold": {"a": cold}}},
        "memory": {
            "kv_swap": {
                "bytes_per_s": 6e9,
                "limit_bytes_per_s": 8e9,
                "memcpy_bytes_per_s": {"device_copy": 10e9},
            },
            "kv_overlap": {"hidden_share": 0.75},
        },
        "streams": {"switches": 1200, **dict.fromkeys(COUNT_LIMITS, 0)},
        "operations": {"operations": 100, "asked": 100, "passed": True},
    }
    return usual | changes


def switch(weight_bytes: int = 0, kv_in_bytes: int = 0) -> Switch:
    seconds = dict.fromkeys(("total_s", "evict_s", "map_s", "weights_s", "kv_s"), 0.0)
    return Switch(
        at=1.0,
        device=0,
        model="a",
        previous=None,
        weight_bytes=weight_bytes,
        kv_in_bytes=kv_in_bytes,
        kv_out_bytes=0,
        **seconds,
    )


class TestFigures:
    def test_each_has_its_limit_and_ratio(self) -> None:
        figures = dict(make_figures(details(), 1000))
        missed = {"measured": 0.004, "limit": 0.002, "ratio": 2.0, "reached": False}
        assert figures["resident_switch_p99_s"] == missed
        assert figures["resident_switch_with_kv_p99_s"] == missed
        assert figures["cold_switch_p50_s"]["reached"] is True
        assert figures["kv_swap_bytes_per_s"]["ratio"] == 0.75
        assert figures["kv_swap_bytes_per_s"]["reached"] is False
        assert figures["kv_overlap_hidden_share"]["reached"] is True
        assert figures["switches"]["ratio"] == pytest.approx(1.2)

    @pytest.mark.parametrize(
        ("copies", "share", "reached"),
        [
            ({"device_copy": 1e9}, 0.4, False),
            ({"device_copy": 1e9, "memcpy_one_thread": 1e9}, -0.09, True),
            ({"device_copy": 1e9, "memcpy_one_thread": 1e9}, -0.11, False),
        ],
    )
    def test_less_is_hidden_where_the_copying_cores_compute(
        self, copies: dict[str, float], share: float, reached: bool
    ) -> None:
        usual = details()
        usual["memory"]["kv_swap"]["memcpy_bytes_per_s"] = copies
        usual["memory"]["kv_overlap"]["hidden_share"] = share
        figures = dict(make_figures(usual, 1000))
        assert figures["kv_overlap_hidden_share"]["reached"] is reached

    def test_operations_that_failed_do_not_count_as_reached(self) -> None:
        failed = {"operations": 100, "asked": 100, "passed": False}
        figures = dict(make_figures(details(operations=failed), 1000))
        assert figures["memory_operations"]["reached"] is False

    def test_the_table_marks_what_was_missed(self) -> None:
        measured = details()
        measured["streams"] |= {"pages_leaked": 3, "host_bytes_gained": 5}
        figures = dict(make_figures(measured, 1000))
        lines = {line.split()[0]: line for line in table(figures)}
        assert "4ms" in lines["resident_switch_p99_s"]
        assert "5.59 GiB/s" in lines["kv_swap_bytes_per_s"]
        marked = {name for name, line in lines.items() if line.endswith("MISSED")}
        assert marked == {
            *("resident_switch_p99_s", "resident_switch_with_kv_p99_s"),
            *("kv_swap_bytes_per_s", "pages_leaked"),
        }


class TestStreams:
    @pytest.mark.parametrize(
        ("together", "count"), [([1, 2, 3], 0), ([1, 9, 3], 1), ([1], 2), ([1, 2, 3, 4, 5], 2)]
    )
    def test_tokens_that_differ_are_missing_or_too_many(
        self, together: list[int], count: int
    ) -> None:
        assert num_differing([1, 2, 3], together) == count

    def test_only_switches_that_moved_bytes_count(self) -> None:
        switches = [switch(100), switch(), switch(50, 7)]
        figures = summary(Answers(), switches, [LEFT], 2.0)
        assert (figures["switches"], figures["switches_with_kv"]) == (2, 1)
        assert figures["bytes_moved"] == 157

    def test_what_is_not_back_is_told(self) -> None:
        after = LEFT | {"free_pages": 237, "kv_host_bytes": 64, "shmem_bytes": (50 << 20) + 4096}
        peak = LEFT | {"anon_bytes": 500 << 20}
        answers = Answers({("a", 0): [1, 2]}, [(("a", 0), [1, 2]), (("a", 0), [1])])
        figures = summary(answers, [], [LEFT, peak, after], 2.0)
        assert figures["pages_leaked"] == 3
        assert figures["host_bytes_gained"] == 64 + 4096
        assert (figures["answers"], figures["tokens"], figures["differing_tokens"]) == (2, 3, 1)

    @pytest.mark.parametrize(
        ("values", "gained"),
        [
            ([5], 0),
            ([5, 4, 3], -2),
            ([0, 10, 700_010, 700_020], 20),
            ([0, 700_000, 1_400_001], 700_000),  # a second one counts
            ([0, 2_000_000, 2_000_010], 2_000_000),  # too large for one
            ([0, 900_000, 0, 900_000, 0, 900_000], 0),  # what comes and goes hides nothing else
            ([900_000, 0, 900_000, 0, 0, 0], -450_000),
        ],
    )
    def test_one_arena_is_no_leak(self, values: list[int], gained: int) -> None:
        assert heap_gained(values) == gained


def test_the_page_gets_the_report_s_numbers() -> None:
    report = {
        "figures": {
            "resident_switch_p99_s": at_most(0.001, 0.002),
            "kv_swap_bytes_per_s": at_least(1 << 30, 1 << 31),
            "pages_leaked": at_most(0, 0),
        },
        "details": {"limit_s": 3},
    }
    page = "before\n<!-- bench-memory -->\nold\n<!-- end -->\nafter\n"
    lines = rewritten(page, report).splitlines()
    assert lines[:2] + lines[-2:] == [*page.splitlines()[:2], "<!-- end -->", "after"]
    assert lines[4:6] == [
        "| `resident_switch_p99_s` | 1ms | 2ms | yes |",
        "| `kv_swap_bytes_per_s` | 1 GiB/s | 2 GiB/s | **no** |",
    ]
    assert lines[6] == "| `pages_leaked` | 0 | 0 | yes |"
    assert len(lines) == 4 + 3 + 2
    with pytest.raises(UsageError, match="bench-memory"):
        rewritten("no place", report)
