"""Extents of a model's memory beside pieces of the host's: each byte has its place."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from gpupoold.memory.host import lay

Spans = list[tuple[int, int]]
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def places(spans: Spans) -> list[int]:
    """The address of each byte, in order."""
    return [address + at for address, length in spans for at in range(length)]


@st.composite
def spans_of(draw: st.DrawFn, num_bytes: int) -> Spans:
    """So many bytes in spans that do not overlap, at addresses in any order."""
    inner = st.integers(1, num_bytes - 1) if num_bytes > 1 else st.nothing()
    cuts = draw(st.sets(inner, max_size=12)) if num_bytes > 1 else set()
    lengths = [end - start for start, end in itertools.pairwise([0, *sorted(cuts), num_bytes])]
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    at, spans = 1000, []
    for gap, length in zip(gaps, lengths, strict=True):
        spans.append((at + gap, length))
        at += gap + length
    return draw(st.permutations(spans))


@st.composite
def both(draw: st.DrawFn) -> tuple[Spans, Spans]:
    num_bytes = sum(draw(LENGTHS))
    return draw(spans_of(num_bytes)), draw(spans_of(num_bytes))


@given(both())
def test_each_byte_lies_beside_its_own(drawn: tuple[Spans, Spans]) -> None:
    extents, pieces = drawn
    laid = list(lay(extents, pieces))
    assert places([(address, length) for address, _, length in laid]) == places(extents)
    assert places([(host, length) for _, host, length in laid]) == places(pieces)


@given(both())
def test_it_is_cut_only_where_one_of_them_ends(drawn: tuple[Spans, Spans]) -> None:
    extents, pieces = drawn
    laid = list(lay(extents, pieces))
    assert all(length > 0 for _, _, length in laid)
    ends = {end for spans in drawn for end in itertools.accumulate(length for _, length in spans)}
    assert list(itertools.accumulate(length for _, _, length in laid)) == sorted(ends)


@given(both())
def test_it_is_its_own_inverse(drawn: tuple[Spans, Spans]) -> None:
    extents, pieces = drawn
    there = [(address, host, length) for address, host, length in lay(extents, pieces)]
    back = [(address, host, length) for host, address, length in lay(pieces, extents)]
    assert there == back


@given(spans_of(40))
def test_less_than_there_is_room_for_lies_at_the_front(pieces: Spans) -> None:
    laid = list(lay([(0, 17)], pieces))
    assert places([(host, length) for _, host, length in laid]) == places(pieces)[:17]


def test_nothing_needs_no_place() -> None:
    assert list(lay([], [])) == []
