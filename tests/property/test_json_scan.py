"""The scan agrees with a parser, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st

from gpupoold.frontend.body import JsonScan

texts = st.text(st.sampled_from('ab,[]{}"\\: é\n'), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def count(value: Any) -> tuple[int, int, int]:
    """Containers, strings with the names of fields, and the values that are not empty lists."""
    if isinstance(value, str):
        return 0, 1, 1
    if not isinstance(value, list | dict):
        return 0, 0, 1
    inner = list(value.values()) if isinstance(value, dict) else value
    names = len(value) if isinstance(value, dict) else 0
    parts = [count(one) for one in inner]
    # A text that is cut cannot know that brackets stay empty: they count one value more.
    return (
        1 + sum(part[0] for part in parts),
        names + sum(part[1] for part in parts),
        1 + (sum(part[2] for part in parts) or 1),
    )


@given(values, st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_counts(value: Any, is_ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    scan, start = JsonScan(), 0
    for end in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        scan.feed(text[start:end])
        start = end
    assert (scan.num_containers, scan.num_strings, scan.num_values) == count(value)
