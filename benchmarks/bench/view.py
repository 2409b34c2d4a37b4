"""Tables of the benchmarks for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpupool_cli.output import Column, print_fields, print_line, print_table
from gpupoold.units import format_bytes, format_duration

_STAGES = ("read_s", "switch_s", "evict_s", "map_s", "weights_s", "kv_s")


def show_fields(result: Mapping[str, Any]) -> None:
    """Every figure on a line."""
    flat = dict(_flatten(result))
    print_fields({name: _text(name, value) for name, value in flat.items()})


def show_switches(result: Mapping[str, Any]) -> None:
    """Print a row per mode, with its limit; then the time of the first token."""
    titles = ["mode", "KV", "switches", "moved", "p50", "p99"]
    titles += [stage.removesuffix("_s") for stage in _STAGES]
    print_table(_columns([*titles, "limit", "of", "reached"], 2), list(_switch_rows(result)))
    print_line("")
    titles = ["prompt tokens", "samples", "prefill", "first token", "early", "late weights"]
    print_table(_columns(titles), [_first_token_row(row) for row in result["first_tokens"]])


def show_memory(result: Mapping[str, Any]) -> None:
    """Print tables of copies and mapping, then the cost of KV."""
    print_line(f"pages of {format_bytes(result['page_bytes'])}")
    print_table(
        _columns(["copy", "direction", "cut into", "bandwidth", "of plain"], 3),
        [_copy_row(row) for row in result["copies"]],
    )
    print_line("")
    keys = ("map_p50_s", "unmap_p50_s", "map_s_per_page", "unmap_s_per_page")
    print_table(
        _columns(["pages", "runs", "map", "unmap", "map per page", "unmap per page"]),
        [
            [str(row["pages"]), str(row["runs"]), *(format_duration(row[key]) for key in keys)]
            for row in result["mapping"]
        ],
    )
    print_line("")
    show_fields({name: result[name] for name in ("transfer_round_trip", "kv_swap", "kv_overlap")})


def _switch_rows(result: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for mode, kinds in result["modes"].items():
        for kind, row in kinds.items():
            times_s = [row["p50_s"], row["p99_s"]]
            times_s += [row["stages_p50_s"].get(stage, 0.0) for stage in _STAGES]
            yield (
                mode,
                kind.replace("_", " "),
                str(row["samples"]),
                format_bytes(row["bytes"]),
                *map(_duration, times_s),
                _duration(row["limit_s"]),
                row["limit_of"].removesuffix("_s"),
                "yes" if row["reached"] else "no",
            )


def _first_token_row(row: Mapping[str, Any]) -> list[str]:
    late_bytes = row.get("late_bytes", 0)
    return [
        str(row["prompt_tokens"]),
        str(row["samples"]),
        *(_duration(row.get(f"{name}_p50_s", 0.0)) for name in ("prefill", "whole", "early")),
        format_bytes(late_bytes) if late_bytes else "",
    ]


def _copy_row(row: Mapping[str, Any]) -> list[str]:
    cuts = {"batch_bytes": "batches of", "piece_bytes": "pieces of"}
    return [
        row["by"],
        row["direction"],
        "".join(f"{text} {format_bytes(row[key])}" for key, text in cuts.items() if key in row),
        f"{format_bytes(row['bytes_per_s'])}/s",
        f"{row['ratio']:.2f}",
    ]


def _columns(titles: Sequence[str], num_left: int = 0) -> list[Column]:
    return [Column(title, right=index >= num_left) for index, title in enumerate(titles)]


def _duration(seconds: float) -> str:
    return format_duration(seconds) if seconds else ""


def _flatten(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(name: str, value: object) -> str:
    if isinstance(value, float) and "bytes_per_s" in name:
        return f"{format_bytes(value)}/s"
    if isinstance(value, float) and name.endswith("_s") and not name.endswith("per_s"):
        sign = "-" if value < 0 else ""
        return sign + format_duration(abs(value))
    if isinstance(value, int) and name.endswith("bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
