"""Rows of the history for finished requests."""

from __future__ import annotations

from gpupool_state import RequestRow
from gpupoold.control.live_requests import LiveRequest
from gpupoold.domain import DeviceId, FinishReason, ModelName
from gpupoold.stats.histogram import percentile


def finish_reason(text: str) -> FinishReason:
    """Convert the engine's reason for the end of an answer."""
    try:
        return FinishReason(text)
    except ValueError:
        return FinishReason.STOP  # vLLM's newer reasons ("repetition") are kinds of stopping


def request_row(
    request: LiveRequest, reason: FinishReason, error: str, now_s: float, wall_now_s: float
) -> RequestRow:
    """Build the history row of a request that ends now. ``error``: the message for the client.

    ``now_s`` is monotonic, ``wall_now_s`` the same instant in seconds since the epoch.
    """
    gaps_s = request.gaps_s
    return RequestRow(
        request_id=request.request_id,
        model=ModelName(request.counted_name),
        device=None if request.device is None else DeviceId(request.device),
        arrived_at=wall_now_s - (now_s - request.arrival_s),
        ttft_s=request.ttft_s,
        tbt_p50_s=percentile(gaps_s, 0.5),
        tbt_p99_s=percentile(gaps_s, 0.99),
        tbt_max_s=max(gaps_s, default=None),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=len(request.token_times_s),
        num_tokens_in_time=request.num_in_time,
        finish_reason=reason,
        total_s=now_s - request.arrival_s,
        error=error,
        api_key=request.key_id or None,
    )
