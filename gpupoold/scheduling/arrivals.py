"""Recent arrivals by model and class of prompt length: rates and mean lengths.

The one estimate of demand: roles, planned homes and the number of devices for each stage read it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from gpupoold.scheduling.output_length import prompt_class
from gpupoold.scheduling.velocity import RequestClass

RECENT_S = 30.0
# Long enough for sixty arrivals of a model with a request in ten seconds.
LASTING_S = 600.0
# A window moves by a sixtieth of the length, so the memory does not grow with the rate.
_NUM_BUCKETS = 60


@dataclass(slots=True)
class _Sums:
    """Sums over requests of one model and class."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def subtract(self, other: _Sums) -> None:
        self.num_requests -= other.num_requests
        self.prompt_tokens -= other.prompt_tokens
        self.output_tokens -= other.output_tokens


@dataclass(slots=True)
class _Bucket:
    """Arrivals of a sixtieth of the window, by model and class."""

    number: int
    sums: dict[tuple[str, int], _Sums] = field(default_factory=dict)


class ArrivalWindow:
    """The requests of about the last ``window_s``, with their expected lengths.

    Sums are updated as requests enter and leave the window, so that reading is cheap.
    """

    def __init__(self, window_s: float = RECENT_S) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _NUM_BUCKETS
        self._buckets: deque[_Bucket] = deque()
        self._sums: dict[str, dict[int, _Sums]] = {}
        self._first_s: float | None = None

    def add(self, model: str, at_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request with its expected length; ``at_s`` never decreases."""
        if self._first_s is None:
            self._first_s = at_s
        number = int(at_s / self._bucket_s)
        if not self._buckets or self._buckets[-1].number != number:
            self._forget(at_s)  # the window is a whole number of buckets
            self._buckets.append(_Bucket(number))
        length_class = prompt_class(prompt_tokens)
        output_tokens = max(1, output_tokens)
        in_bucket, classes = self._buckets[-1].sums, self._sums.setdefault(model, {})
        if (model, length_class) not in in_bucket:  # quicker than setdefault(..., _Sums())
            in_bucket[model, length_class] = _Sums()
        if length_class not in classes:
            classes[length_class] = _Sums()
        in_bucket[model, length_class].add(prompt_tokens, output_tokens)
        classes[length_class].add(prompt_tokens, output_tokens)

    def seen_s(self, now_s: float) -> float:
        """Return the seconds of recorded arrivals, at most the window."""
        return 0.0 if self._first_s is None else min(now_s - self._first_s, self._window_s)

    def models(self, now_s: float) -> list[str]:
        """Return the models with arrivals."""
        self._forget(now_s)
        return list(self._sums)

    def rates_rps(self, now_s: float) -> dict[str, dict[RequestClass, float]]:
        """Return requests per second by model and class; a class has its requests' mean lengths."""
        begin_s = (self._forget(now_s) + 1) * self._bucket_s
        counted_s = max(min(self.seen_s(now_s), now_s - begin_s), 1.0)
        rates: dict[str, dict[RequestClass, float]] = {}
        for name, classes in self._sums.items():
            by_class = rates[name] = {}
            for sums in classes.values():
                num = sums.num_requests
                prompt_tokens = max(1, round(sums.prompt_tokens / num))
                kind = RequestClass(prompt_tokens, max(1, round(sums.output_tokens / num)))
                by_class[kind] = by_class.get(kind, 0.0) + num / counted_s
        return rates

    def _forget(self, now_s: float) -> int:
        """Drop the buckets that began before the window; return the number of the last one."""
        last = math.floor((now_s - self._window_s) / self._bucket_s)
        while self._buckets and self._buckets[0].number <= last:
            for (model, length_class), gone in self._buckets.popleft().sums.items():
                classes = self._sums[model]
                classes[length_class].subtract(gone)
                if not classes[length_class].num_requests:
                    del classes[length_class]
                    if not classes:
                        del self._sums[model]
        return last


class Arrivals:
    """All arrivals: the ``recent`` ones for roles, the ``lasting`` ones for homes."""

    def __init__(self) -> None:
        self.recent = ArrivalWindow(RECENT_S)
        self.lasting = ArrivalWindow(LASTING_S)

    def add(self, model: str, at_s: float, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request that arrived or has to be prefilled again."""
        for window in (self.recent, self.lasting):
            window.add(model, at_s, prompt_tokens, output_tokens)
