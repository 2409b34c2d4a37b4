"""Refusal of requests, and the time for clients to wait before a retry."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Literal, get_args

from gpupool_state import History
from gpupoold.api_keys import KEY_BYTES_SHARE
from gpupoold.config.sections import LimitSettings
from gpupoold.control.access import Keyring
from gpupoold.control.accounting.meters import RefusalEvents
from gpupoold.control.accounting.model_stats import ModelStats
from gpupoold.control.live_requests import LiveRequest, LiveRequests, num_bytes_of
from gpupoold.domain import Priority
from gpupoold.scheduling.state import State
from gpupoold.scheduling.wait_estimate import Drain, drain_of, first_token_in_s
from gpupoold.units import format_duration
from gpupoold.wire import messages as m

# Seconds for which an estimate is reused: estimates for a flood of requests are expensive.
_DRAIN_HOLDS_S = 1.0
# Refused clients counted as returning, as a multiple of the bound.
_MAX_TURNS = 3
# Retry time without an estimate.
_UNKNOWN_S = 5.0
_UNROUTED_S = 1.0

RefusalReason = Literal[
    "not_served", "model_queue_full", "queue_full", "key_full", "bytes_full", "too_late"
]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)

# The key of all models in place of a model's name.
_ALL = ""

# Shares of each bound reserved for requests of higher priority. Without keys of high priority
# nothing is reserved for such keys; requests without a key have normal priority.
_KEPT_FROM_BACKGROUND = 0.5
_KEPT_FROM_LOW = 0.25
_KEPT_FROM_NORMAL = 0.1


def bound_for(priority: Priority, bound: int, keys: Keyring | None) -> int:
    """Return the number of live requests from which on this priority is refused; at least 1."""
    kept_share = 0.0
    if priority is Priority.BACKGROUND:
        kept_share = _KEPT_FROM_BACKGROUND
    elif priority is Priority.LOW:
        kept_share = _KEPT_FROM_LOW
    elif priority is Priority.NORMAL and keys is not None and keys.has_high:
        kept_share = _KEPT_FROM_NORMAL
    return max(1, bound - math.ceil(kept_share * bound))


class Overload:
    """Bounds of the queues, and the refusal of requests beyond the bounds.

    ``limits`` may be replaced at any time; ``on_refused`` gets the model and the reason of each
    refusal. Not thread-safe.
    """

    def __init__(
        self,
        limits: LimitSettings,
        history: History,
        live: LiveRequests,
        stats: dict[str, ModelStats],
        state: State,
        on_refused: Callable[[str, str], None],
        keys: Keyring | None = None,
    ) -> None:
        self.limits = limits
        self._keys = keys
        self._live = live
        self._stats = stats
        self._state = state
        self._on_refused = on_refused
        self._events = RefusalEvents(history)
        self._drains: dict[str, tuple[float, Drain]] = {}
        self._promised_s: dict[tuple[str, int], list[float]] = {}

    def admission(
        self, message: m.AddRequest, now_s: float, *, is_routed: bool, is_warm: bool
    ) -> m.AdmissionAnswer:
        """Decide on a request; count a refusal.

        ``is_routed``: a worker has the model; ``is_warm``: the worker needs no snapshot first.
        """
        name = message.counted_name
        if not is_routed:
            self._on_refused(name, "not_served")
            text = f"The model `{name}` cannot be served right now."
            return _refusal(message, HTTPStatus.SERVICE_UNAVAILABLE, text, _UNROUTED_S)
        found = self._full(message, now_s) or self._late(message, now_s, is_warm=is_warm)
        if found is None:
            return m.AdmissionAnswer(message.model, message.request_id)
        reason, text, retry_after_s = found
        self._on_refused(name, reason)
        self._stats.setdefault(name, ModelStats()).now.refused += 1
        self._events.note(name, text, now_s)
        return _refusal(message, HTTPStatus.TOO_MANY_REQUESTS, text, retry_after_s)

    def too_late(self, now_s: float) -> list[LiveRequest]:
        """Return requests to drop: without a worker at the deadline of the first token.

        Empty unless ``[limits] drop_late`` is set. The requests are counted.
        """
        if not self.limits.drop_late:
            return []
        late = [
            request
            for request in self._live.all()
            if request.device is None
            and not request.token_times_s
            and now_s > request.next_deadline_s
        ]
        for request in late:
            self._stats.setdefault(request.counted_name, ModelStats()).now.dropped += 1
        return late

    def report(self, now_s: float) -> None:
        """Record due events."""
        self._events.report(now_s)

    def forget(self, model: str) -> None:
        self._drains.pop(model, None)
        for key in [key for key in self._promised_s if key[0] == model]:
            del self._promised_s[key]

    def _full(self, message: m.AddRequest, now_s: float) -> tuple[RefusalReason, str, float] | None:
        """Return the reason for a full queue, as a word and a sentence, and the waiting time."""
        limits, model = self.limits, message.model
        num_live = self._live.num_of(model)
        bound = bound_for(message.priority, limits.max_live_requests_per_model, self._keys)
        if num_live >= bound:
            text = f"The model `{model}` already has {num_live} requests waiting or running."
            return "model_queue_full", text, self._space_in_s(model, num_live, bound, now_s)
        num_live = len(self._live)
        bound = bound_for(message.priority, limits.max_live_requests, self._keys)
        if num_live >= bound:
            text = f"{num_live} requests are already waiting or running."
            return "queue_full", text, self._space_in_s(_ALL, num_live, bound, now_s)
        # Batches have a limit of their own.
        key_id = "" if message.is_background else message.key_id
        return self._full_key(key_id) or self._full_bytes(message)

    def _full_key(self, key_id: str) -> tuple[RefusalReason, str, float] | None:
        """Return the refusal at a key's limit of live requests, and the waiting time."""
        bound = self._keys.max_live(key_id) if self._keys is not None and key_id else None
        num_live = self._live.num_of_key(key_id)
        if bound is None or num_live < bound:
            return None
        text = f"This API key already has {num_live} requests waiting or running."
        # The requests of one key are too few, and of too many models, for an estimate.
        return "key_full", text, _UNKNOWN_S

    def _full_bytes(self, message: m.AddRequest) -> tuple[RefusalReason, str, float] | None:
        """Return the refusal for lack of space in the bytes of live requests."""
        num_bytes, bound = num_bytes_of(message), self.limits.max_bytes_in_flight
        key_id = message.key_id
        if key_id and self._live.bytes_of_key(key_id) + num_bytes > bound * KEY_BYTES_SHARE:
            bound, whose = int(bound * KEY_BYTES_SHARE), " of this API key"
        elif self._live.num_bytes + num_bytes > bound:
            whose = ""
        else:
            return None
        text = f"Waiting and running requests{whose} may have at most {bound:,} bytes in total."
        return "bytes_full", text, _UNKNOWN_S

    def _space_in_s(self, key: str, num_live: int, bound: int, now_s: float) -> float:
        """Return the seconds until a request has space, behind all clients refused before.

        With the same time for all clients, all would return at once, and all but one in vain. Only
        a bounded number of refused clients counts, because some never return, or return early.
        """
        promised_s = self._promised_s.setdefault((key, bound), [])
        while promised_s and (promised_s[0] <= now_s or len(promised_s) > _MAX_TURNS * bound):
            heapq.heappop(promised_s)
        drain = self._drain(key, now_s)
        space_in_s = drain.seconds_until(num_live - bound + 1 + len(promised_s))
        if space_in_s is None:
            return _UNKNOWN_S
        heapq.heappush(promised_s, now_s + space_in_s)
        return space_in_s

    def _drain(self, key: str, now_s: float) -> Drain:
        known = self._drains.get(key)
        if known is not None and now_s - known[0] < _DRAIN_HOLDS_S:
            return known[1]
        drain = drain_of(self._state, self._state.models.get(key), now_s, self._max_tokens)
        self._drains[key] = now_s, drain
        return drain

    def _max_tokens(self, request_id: str) -> int | None:
        request = self._live.get(request_id)
        return None if request is None else request.order.max_tokens

    def _late(
        self, message: m.AddRequest, now_s: float, *, is_warm: bool
    ) -> tuple[RefusalReason, str, float] | None:
        """Return the reason to expect a late first token, and the seconds before a retry.

        The time to warm a model is unknown, so a request of a cold model may still be dropped
        later. A background request has a day.
        """
        if not self.limits.drop_late or not is_warm or message.is_background:
            return None
        model = self._state.models[message.model]
        wait_s = first_token_in_s(self._state, model, message.num_prompt_tokens, now_s)
        ttft_s = model.targets.ttft_s
        if wait_s is None or now_s + wait_s <= message.arrival_s + ttft_s:
            return None
        text = (
            f"The first token of `{model.name}` would take {format_duration(wait_s)}, "
            f"more than the target of {format_duration(ttft_s)}."
        )
        return "too_late", text, max(wait_s - ttft_s, 0.0)


def _refusal(
    message: m.AddRequest, status: HTTPStatus, text: str, retry_after_s: float
) -> m.AdmissionAnswer:
    return m.AdmissionAnswer(message.model, message.request_id, status.value, text, retry_after_s)
