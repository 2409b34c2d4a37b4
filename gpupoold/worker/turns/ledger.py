"""A worker's record of its requests, for the order of eviction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpupoold.domain import Targets
from gpupoold.wire.messages import RequestProgress


@dataclass(slots=True)
class _LedgerEntry:
    arrival_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class _Page:
    targets: Targets
    requests: dict[str, _LedgerEntry] = field(default_factory=dict)


class RequestLedger:
    """Live requests by model. Events about ended requests are ignored."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}

    def add_model(self, model: str, targets: Targets) -> None:
        """Add a model, which can then have requests."""
        self._pages[model] = _Page(targets)

    def set_targets(self, model: str, targets: Targets) -> None:
        """Set a model's targets, for live requests too."""
        self._pages[model].targets = targets

    def remove_model(self, model: str) -> None:
        """Remove a model and its requests."""
        del self._pages[model]

    def arrive(self, model: str, request_id: str, arrival_s: float) -> None:
        self._pages[model].requests[request_id] = _LedgerEntry(arrival_s)

    def progress(self, model: str, request_id: str, num_tokens: int) -> None:
        entry = self._pages[model].requests.get(request_id)
        if entry is not None:
            entry.num_tokens += num_tokens

    def record(self, model: str, progress: Iterable[RequestProgress]) -> None:
        """Record the results of a step."""
        requests = self._pages[model].requests
        for item in progress:
            if (entry := requests.get(item.request_id)) is not None:
                entry.num_tokens += len(item.new_token_ids) or item.num_tokens
                if item.finish_reason is not None:
                    del requests[item.request_id]

    def finish(self, model: str, request_id: str) -> None:
        """Record the end of a request."""
        self._pages[model].requests.pop(request_id, None)

    def is_idle(self) -> bool:
        """Return whether no model has a request."""
        return not any(page.requests for page in self._pages.values())

    def num_live(self, model: str) -> int:
        """Return the number of the model's live requests."""
        return len(self._pages[model].requests)

    def num_waiting(self, model: str) -> int:
        """Return the number of the model's requests without a token."""
        return sum(not entry.num_tokens for entry in self._pages[model].requests.values())

    def live_requests(self, model: str) -> list[str]:
        """Return the ids of the model's live requests."""
        return list(self._pages[model].requests)

    def ttft_s(self, model: str) -> float:
        return self._pages[model].targets.ttft_s

    def next_deadline_of_all_s(self) -> float:
        """Return the earliest deadline of all requests; infinity without requests."""
        return min(map(self.next_deadline_s, self._pages), default=math.inf)

    def next_deadline_s(self, model: str) -> float:
        """Return the earliest deadline among the model's requests; infinity without requests."""
        page = self._pages[model]
        return min(
            (
                page.targets.deadline_s(entry.arrival_s, entry.num_tokens)
                for entry in page.requests.values()
            ),
            default=math.inf,
        )
