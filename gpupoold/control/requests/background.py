"""Requests of batches that wait outside the core for a device with time to spare."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.scheduling.background import has_room
from gpupoold.scheduling.state import State


class BackgroundQueue:
    """Waiting background requests by model; ``pass_on`` gives a request to the core.

    A request that has ended meanwhile is dropped when its turn comes.
    """

    def __init__(
        self, live: LiveRequests, state: State, pass_on: Callable[[LiveRequest], None]
    ) -> None:
        self._live = live
        self._state = state
        self._pass_on = pass_on
        self._waiting: defaultdict[str, deque[LiveRequest]] = defaultdict(deque)

    def add(self, request: LiveRequest) -> None:
        self._waiting[request.model].append(request)
        self.fill()

    def fill(self) -> None:
        """Pass on requests while devices have room; the models take turns."""
        models = deque(self._waiting)
        while models:
            name = models.popleft()
            request = self._next(name)
            model = self._state.models.get(name)
            if request is None or model is None:
                continue
            order = request.order
            if has_room(self._state, model, order.num_prompt_tokens, order.max_tokens):
                self._waiting[name].popleft()
                self._pass_on(request)
                models.append(name)

    def _next(self, name: str) -> LiveRequest | None:
        """Return the oldest waiting request of a model that is still live."""
        queue = self._waiting[name]
        while queue and self._live.get(queue[0].request_id) is not queue[0]:
            queue.popleft()
        if queue:
            return queue[0]
        del self._waiting[name]
        return None
