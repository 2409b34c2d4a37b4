"""The choice of groups in the output of ``gpupool plan``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from gpupoold.sim.planner.groups import GroupChoice, GroupingTried
from gpupoold.sim.planner.run import Attained
from gpupoold.sim.planner.text import names_text


def group_lines(choice: GroupChoice, attained: Callable[[Attained], str]) -> Iterator[str]:
    """Yield the chosen groups, then the others, and single GPUs if these cannot run all models.

    ``attained`` returns a share as text.
    """
    best, *others = choice.tried
    yield f"{best.text} carries the most: {_result(best, attained)}."
    for one in others:
        yield f"- {one.text}: {_result(one, attained)}"
    yield from _size_lines(choice.best_degrees)


def group_document(choice: GroupChoice, target: float) -> list[dict[str, object]]:
    """Return the groupings as JSON, the best first."""
    return [
        {
            "groups": one.text,
            "attainment": one.attained.overall if one.attained else None,
            "reaches": one.attained is not None and one.attained.reaches(target),
            "growth": one.growth,
            "refused": one.refused,
        }
        for one in choice.tried
    ]


def _result(one: GroupingTried, attained: Callable[[Attained], str]) -> str:
    if one.attained is None:
        return f"not possible: {one.refused}"
    share = f"{attained(one.attained)} of the tokens in time"
    if not one.growth:
        return f"{share}, too few"
    return f"{share}; {one.growth:g} times the load fits" if one.growth > 1 else share


def _size_lines(best_degrees: Mapping[str, int]) -> Iterator[str]:
    """Yield the group sizes of equation 6, which looks at each model alone."""
    by_degree: dict[int, list[str]] = defaultdict(list)
    for name, degree in best_degrees.items():
        by_degree[degree].append(name)
    parts = [
        f"{degree} for {names_text(names, len(best_degrees))}"
        for degree, names in sorted(by_degree.items())
    ]
    yield f"GPUs with which a model alone makes the most tokens per GPU: {', '.join(parts)}."
