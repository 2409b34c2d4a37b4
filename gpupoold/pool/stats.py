"""What ``gpupool ps`` tells of each model: counts since the start, recent latencies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gpupoold.pool.requests import LiveRequest
from gpupoold.stats import percentile
from gpupoold.wire.messages import SwitchRecord

# Sorted whenever they are looked at after a change: that is what bounds them.
_NUM_TTFTS = 1_000
_NUM_GAPS = 2_000


@dataclass(slots=True)
class ModelStats:
    """One model's numbers since the daemon started."""

    requests: int = 0
    completed: int = 0
    tokens: int = 0
    tokens_in_time: int = 0
    refused: int = 0
    """Not taken, as there were too many, or it was too late for them."""
    dropped: int = 0
    """Taken, and ended before they began, as it was too late for them."""
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TTFTS))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))

    _latencies: dict[str, float | None] | None = None

    def end(self, request: LiveRequest, *, completed: bool) -> None:
        """Count a request that ended."""
        self._latencies = None
        self.completed += completed
        self.tokens += len(request.token_times_s)
        self.tokens_in_time += request.num_in_time
        if request.ttft_s is not None:
            self.ttfts_s.append(request.ttft_s)
        self.gaps_s.extend(request.gaps_s)

    @property
    def attainment(self) -> float | None:
        """Share of tokens that met their deadline; None before any token."""
        return self.tokens_in_time / self.tokens if self.tokens else None

    def latencies(self) -> dict[str, float | None]:
        """TTFT and TBT percentiles over the recent past, in seconds."""
        if self._latencies is None:
            ttfts_s, gaps_s = sorted(self.ttfts_s), sorted(self.gaps_s)
            self._latencies = {
                "ttft_p50_s": percentile(ttfts_s, 0.5),
                "ttft_p99_s": percentile(ttfts_s, 0.99),
                "tbt_p50_s": percentile(gaps_s, 0.5),
                "tbt_p99_s": percentile(gaps_s, 0.99),
            }
        return self._latencies


@dataclass(slots=True)
class SwitchStats:
    """Totals over all switches since the daemon started."""

    count: int = 0
    moved_bytes: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("total", "evict", "map", "weights", "kv"), 0.0)
    )

    def add(self, switch: SwitchRecord) -> None:
        """Count a switch."""
        self.count += 1
        self.moved_bytes += switch.weight_bytes + switch.kv_in_bytes + switch.kv_out_bytes
        for stage in self.seconds:
            self.seconds[stage] += getattr(switch, f"{stage}_s")
