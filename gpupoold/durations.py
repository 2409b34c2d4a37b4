"""Seconds by cause or by stage, and counts with such seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from gpupoold.domain import RequestCounts


class _Durations:
    """Base of dataclasses whose fields are durations in seconds."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    def by_name(self) -> dict[str, float]:
        """Return the seconds by the name of the field without ``_s``."""
        return {name.removesuffix("_s"): getattr(self, name) for name in self.__slots__}

    def plus(self, other: Self, sign: int = 1) -> Self:
        """Return the sum, or the difference if ``sign`` is -1."""
        return type(self)(
            *(getattr(self, name) + sign * getattr(other, name) for name in self.__slots__)
        )

    @property
    def total_s(self) -> float:
        """Sum of all fields."""
        return sum(self.by_name().values())


@dataclass(slots=True)
class Lateness(_Durations):
    """Seconds of lateness that answers gained, by cause.

    ``loading``: restoring the model's snapshot. ``queueing``: waiting for a turn. ``switching``:
    bringing the model in. ``computing``: the model's own steps.
    """

    loading_s: float = 0.0
    queueing_s: float = 0.0
    switching_s: float = 0.0
    computing_s: float = 0.0


@dataclass(slots=True)
class LoadStages(_Durations):
    """Seconds of a load in each stage, with the waits for other models' turns.

    ``build``: configuration and construction of the engine. ``read``: the checkpoint. ``snapshot``:
    the weights' move into snapshot and pages. ``compile``: first runs of the model, which compile
    and tune kernels. ``capture``: CUDA graphs. ``check``: the self-check. ``profile``: step times.
    """

    build_s: float = 0.0
    read_s: float = 0.0
    snapshot_s: float = 0.0
    compile_s: float = 0.0
    capture_s: float = 0.0
    check_s: float = 0.0
    profile_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of batches with CUDA graphs: of the load, captured later in ``late_s``, and left."""

    num_first: int = 0
    num_late: int = 0
    num_left: int = 0
    late_s: float = 0.0


@dataclass(slots=True)
class RequestStages(_Durations):
    """Seconds that requests spent in each stage.

    ``loading``: restoring the model's snapshot. ``queueing``: waiting for a turn. ``switching``:
    bringing the model in, except its KV. ``kv``: bringing the model's KV in, or waiting during the
    turn for the request's KV from another device. ``computing``: the model's own steps.
    """

    loading_s: float = 0.0
    queueing_s: float = 0.0
    switching_s: float = 0.0
    kv_s: float = 0.0
    computing_s: float = 0.0

    def add(self, other: RequestStages) -> None:
        """Add ``other`` in place, faster than :meth:`plus`."""
        self.loading_s += other.loading_s
        self.queueing_s += other.queueing_s
        self.switching_s += other.switching_s
        self.kv_s += other.kv_s
        self.computing_s += other.computing_s


@dataclass(slots=True)
class TimedCounts(RequestCounts):
    """Counts with causes of lateness, and by stage all times to the first and between tokens."""

    lateness: Lateness = field(default_factory=Lateness)
    first_token: RequestStages = field(default_factory=RequestStages)
    between_tokens: RequestStages = field(default_factory=RequestStages)
