"""Records of live requests."""

from __future__ import annotations

from gpupoold.control.live_requests import LiveRequest
from gpupoold.domain import Targets
from gpupoold.wire import messages as m


def live_request(
    request_id: str = "r",
    model: str = "m",
    *,
    arrival_s: float = 0.0,
    targets: Targets | None = None,
    device: int | None = 0,
    num_prompt_tokens: int = 1,
    key_id: str = "",
    num_bytes: int = 0,
    served_name: str = "",
) -> LiveRequest:
    """A request as it comes, with answers of at most 100 tokens."""
    frames = [b"x" * num_bytes]
    order = m.AddRequest(
        model,
        request_id,
        arrival_s,
        num_prompt_tokens,
        100,
        frames,
        key_id=key_id,
        served_name=served_name,
    )
    return LiveRequest(order, targets or Targets(1.0, 0.5), device)
