"""What was observed of requests: output lengths, arrivals, and tokens found in the prefix cache.

Output lengths are predicted by the mean of similar requests (Aladdin, section 2, appendix D).
Similar means the same model and a similar prompt length. The mean is crude for one request but
unbiased, so that errors cancel within a batch. Memory is bounded: a window of recent lengths per
class of each recently used model.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WINDOW = 256  # latest requests that count, per class
MAX_MODELS = 1024
NUM_PROMPT_CLASSES = 18  # powers of two up to 128 K tokens and one for all longer prompts
DEFAULT_OUTPUT_TOKENS = 256.0
# The mean of few answers is unreliable, so the mean of all classes is added with the weight of this
# many answers. With 8, predicted sums over batches of 16 have 1 to 19 % less error than with a
# single running mean, on ShareGPT and on six recorded workloads; with 0, classes with few answers
# cost 8 % on ShareGPT.
PRIOR_REQUESTS = 8

RECENT_S = 30.0
# Long enough for sixty arrivals of a model with a request in ten seconds.
LASTING_S = 600.0
# A window moves by a sixtieth of the length, so the memory does not grow with the rate.
_NUM_BUCKETS = 60

# The weight of an earlier request falls to a half within so many requests of its class.
_HALF_LIFE_REQUESTS = 32
_DECAY = 0.5 ** (1 / _HALF_LIFE_REQUESTS)
# Until a class has seen some requests, so many without any cached token are counted with them.
_PRIOR_REQUESTS = 4


@dataclass(frozen=True, slots=True, order=True)
class RequestClass:
    """Requests of about the same prompt and output length, in tokens."""

    num_prompt_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError(f"a request class has a token of each kind at least, got {self}")

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that a request of the class holds at the end."""
        return self.num_prompt_tokens + self.num_output_tokens


def prompt_class(num_prompt_tokens: int) -> int:
    """Return the class of a prompt length: the exponent of the next power of two, at most 17.

    Raises ValueError for a negative length.
    """
    if num_prompt_tokens < 0:
        raise ValueError(f"a prompt has no negative length, got {num_prompt_tokens}")
    return min(max(num_prompt_tokens - 1, 0).bit_length(), NUM_PROMPT_CLASSES - 1)


class RecentLengths:
    """The latest lengths of one class and their running sum."""

    __slots__ = ("_lengths", "_next", "_sum", "_window")

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._lengths = array("q")
        self._next = 0
        self._sum = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self._lengths)

    def add(self, num_tokens: int) -> None:
        """Add a length; drop the oldest if the window is full."""
        if len(self._lengths) < self._window:
            self._lengths.append(num_tokens)
        else:
            self._sum -= self._lengths[self._next]
            self._lengths[self._next] = num_tokens
        self._sum += num_tokens
        self._next = (self._next + 1) % self._window

    def mean(self, prior_tokens: float, prior_requests: float) -> float:
        """Return the mean of the window and of ``prior_requests`` further requests of
        ``prior_tokens``.

        Raises ValueError if both are empty.
        """
        num_requests = len(self._lengths) + prior_requests
        if not num_requests:
            raise ValueError("there is no mean without lengths or a prior")
        return (self._sum + prior_requests * prior_tokens) / num_requests

    def mean_above(self, num_tokens: int) -> float | None:
        """Return the mean of the lengths above ``num_tokens``; None without such lengths."""
        longer = [length for length in self._lengths if length > num_tokens]
        return sum(longer) / len(longer) if longer else None


class _ModelHistory:
    """The lengths of one model, by class and of all."""

    __slots__ = ("classes", "recent", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.classes: dict[int, RecentLengths] = {}
        self.recent = RecentLengths(window)

    def of_class(self, length_class: int) -> RecentLengths:
        return self.classes.setdefault(length_class, RecentLengths(self.window))


@dataclass(slots=True)
class OutputLengthPredictor:
    """Predicts output lengths from finished requests.

    ``window`` is the number of requests that count in each class.
    """

    default_tokens: float = DEFAULT_OUTPUT_TOKENS
    window: int = WINDOW
    max_models: int = MAX_MODELS
    prior_requests: float = PRIOR_REQUESTS
    # Least recently observed first.
    _models: dict[str, _ModelHistory] = field(default_factory=dict, init=False)

    @property
    def num_models(self) -> int:
        return len(self._models)

    def predict(self, model: str, num_prompt_tokens: int) -> float:
        """Return the expected output tokens.

        The mean of the class is shrunk towards the model's mean while samples are few, and the
        model's mean towards the default.
        """
        length_class = prompt_class(num_prompt_tokens)
        history = self._models.get(model)
        if history is None:
            return self.default_tokens
        mean = history.recent.mean(self.default_tokens, self.prior_requests)
        recent = history.classes.get(length_class)
        return mean if recent is None else recent.mean(mean, self.prior_requests)

    def predict_again(self, model: str, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Return the expected output tokens of a request that already has ``num_output_tokens``.

        The result is the mean of longer answers in the class, else of the model. Without longer
        answers the result is twice the present length, so that a request is predicted anew only a
        few times.
        """
        length_class = prompt_class(num_prompt_tokens)
        history = self._models.get(model)
        if history is not None:
            for recent in (history.classes.get(length_class), history.recent):
                mean = recent.mean_above(num_output_tokens) if recent is not None else None
                if mean is not None:
                    return mean
        expected = self.predict(model, num_prompt_tokens)
        return expected if expected > num_output_tokens else max(1.0, 2.0 * num_output_tokens)

    def observe(self, model: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record a request that ended by itself; aborted requests must be left out.

        Raises ValueError for a negative length.
        """
        if num_output_tokens < 0:
            raise ValueError(f"an output has no negative length, got {num_output_tokens}")
        length_class = prompt_class(num_prompt_tokens)
        history = self._models.pop(model, None) or _ModelHistory(self.window)
        history.of_class(length_class).add(num_output_tokens)
        history.recent.add(num_output_tokens)
        self._models[model] = history
        if len(self._models) > self.max_models:
            del self._models[next(iter(self._models))]

    def recent(self, model: str) -> Sequence[int]:
        """Return the lengths of a model's latest answers, in no order."""
        history = self._models.get(model)
        return list(history.recent) if history is not None else []

    def forget(self, model: str) -> None:
        """Drop the record of a model."""
        self._models.pop(model, None)


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


@dataclass(slots=True)
class _Seen:
    """Tokens of recent prompts of a class, and those of them that were cached.

    The share of similar requests is a prediction that is wrong for most single requests, whose
    prompt is either new or mostly known, but right in the sum over the prompts that wait for a
    device. As for lengths of answers, similar means the same model and a similar prompt length:
    later turns are longer.
    """

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    num_requests: float = 0.0


class CachedPrompts:
    """Predicts cached tokens from the prompts of earlier requests."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, _Seen]] = {}  # least recently observed first

    def predict(self, model: str, prompt_tokens: int) -> int:
        """Return the expected number of cached tokens of a prompt."""
        seen = self._models.get(model, {}).get(prompt_class(prompt_tokens))
        if seen is None or not seen.cached_tokens:
            return 0
        unseen = 1 + _PRIOR_REQUESTS / seen.num_requests
        share = seen.cached_tokens / (seen.prompt_tokens * unseen)
        return min(int(share * prompt_tokens), max(prompt_tokens - 1, 0))

    def observe(self, model: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Record a prompt, of which ``cached_tokens`` were not computed."""
        classes = self._models.pop(model, {})
        self._models[model] = classes
        if len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        seen = classes.setdefault(prompt_class(prompt_tokens), _Seen())
        seen.num_requests = _DECAY * seen.num_requests + 1
        seen.prompt_tokens = _DECAY * seen.prompt_tokens + prompt_tokens
        seen.cached_tokens = _DECAY * seen.cached_tokens + min(cached_tokens, prompt_tokens)

    def forget(self, model: str) -> None:
        """Drop the record of a model."""
        self._models.pop(model, None)
