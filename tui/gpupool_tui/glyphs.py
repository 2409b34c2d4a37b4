"""Characters for bars, lanes and marks: Unicode's blocks, or ASCII."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of one cell each; ``levels`` go from least to most."""

    is_ascii: bool
    weights: str
    prefetched: str
    kv: str
    free: str
    other: str
    gauge: str
    rest: str
    run: str
    switch: str
    idle: str
    tick: str
    rule: str
    up: str
    down: str
    cursor: str
    dot: str
    separator: str
    levels: str
    nothing: str
    late: str = "!"


UNICODE = Glyphs(
    is_ascii=False,
    weights="█",
    prefetched="▓",
    kv="▒",
    free="·",
    other="▚",
    gauge="━",
    rest="─",
    run="━",
    switch="▒",
    idle="·",
    tick="┴",
    rule="─",
    up="▲",
    down="▼",
    cursor="▸",
    dot="●",
    separator="·",
    levels="▁▂▃▄▅▆▇█",
    nothing="·",
)
ASCII = Glyphs(
    is_ascii=True,
    weights="#",
    prefetched="+",
    kv="=",
    free=".",
    other="?",
    gauge="=",
    rest="-",
    run="=",
    switch="%",
    idle=".",
    tick="+",
    rule="-",
    up="^",
    down="v",
    cursor=">",
    dot="*",
    separator="-",
    levels="_.-:=+*#",
    nothing=" ",
)
