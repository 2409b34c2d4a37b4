"""Live requests and what the daemon knows of each. Pure bookkeeping."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpupoold.domain import Targets


@dataclass(slots=True)
class LiveRequest:
    """One request from its arrival to its end; engines are disposable, this record is not.

    ``worker`` is None until one has got it.
    """

    request_id: str
    model: str
    device: int | None
    arrival_s: float
    targets: Targets
    num_prompt_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_in_time: int = 0
    """Tokens that met their deadline, deadlines being fixed at arrival."""
    late_s: float = 0.0
    """By how much its latest token was late."""
    warmed_s: float | None = None
    """When its model was in host memory, if it had to wait for that."""
    key_id: str = ""
    """Of the API key that it came with."""
    frontend: int = 0
    """The number of the frontend that it came from."""
    num_bytes: int = 0
    """Of the request as it is kept for the workers."""

    def add_tokens(self, token_ids: Sequence[int], at_s: float) -> None:
        """Tokens that went out at ``at_s``."""
        times_s, targets = self.token_times_s, self.targets
        for token_id in token_ids:
            late_s = at_s - targets.deadline_s(self.arrival_s, len(times_s))
            if late_s <= 0:
                self.num_in_time += 1
                late_s = 0.0
            self.late_s = late_s
            times_s.append(at_s)
            self.output_token_ids.append(token_id)

    @property
    def last_sign_s(self) -> float:
        """When its client heard of it last: its latest token, or else its arrival."""
        return self.token_times_s[-1] if self.token_times_s else self.arrival_s

    @property
    def next_deadline_s(self) -> float:
        """When the next token is due."""
        return self.targets.deadline_s(self.arrival_s, len(self.token_times_s))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None before it."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


_API_PREFIXES = ("chatcmpl-", "cmpl-")


def request_id_of(text: str) -> str:
    """The id that a request has here, of the ``id`` of an answer: without the API's prefix."""
    for prefix in _API_PREFIXES:
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return text


class LiveRequests:
    """All live requests by id, counted per model."""

    def __init__(self) -> None:
        self._requests: dict[str, LiveRequest] = {}
        self._num_by_model: Counter[str] = Counter()
        self._num_by_key: Counter[str] = Counter()
        self._bytes_by_key: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Every live request, oldest first; none may come or go meanwhile."""
        return iter(self._requests.values())

    def add(self, request: LiveRequest) -> None:
        """Add a request, whose id no other live one has.

        Raises:
            ValueError: another one has it; nothing has changed.
        """
        if request.request_id in self._requests:
            raise ValueError(f"another live request is called {request.request_id}")
        self._requests[request.request_id] = request
        self._num_by_model[request.model] += 1
        self._num_by_key[request.key_id] += 1
        self._bytes_by_key[request.key_id] += request.num_bytes

    def get(self, request_id: str) -> LiveRequest | None:
        """The request, None when it has ended."""
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> LiveRequest | None:
        """The request ended; None when it had before."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._num_by_model[request.model] -= 1
            self._num_by_key[request.key_id] -= 1
            self._bytes_by_key[request.key_id] -= request.num_bytes
        return request

    def num_of(self, model: str) -> int:
        """Live requests of a model."""
        return self._num_by_model[model]

    def num_of_key(self, key_id: str) -> int:
        """Live requests that came with an API key; with "", those without one."""
        return self._num_by_key[key_id]

    @property
    def num_bytes(self) -> int:
        """Bytes of all live requests, as they are kept."""
        return self._bytes_by_key.total()

    def bytes_of_key(self, key_id: str) -> int:
        """The same of those that came with an API key; with "", of those without one."""
        return self._bytes_by_key[key_id]

    def of_model(self, model: str) -> list[LiveRequest]:
        """A model's live requests, oldest first."""
        return [request for request in self._requests.values() if request.model == model]

    def of_frontend(self, number: int) -> list[LiveRequest]:
        """The live requests that came from a frontend, oldest first."""
        return [request for request in self._requests.values() if request.frontend == number]

    def on_device(self, device: int) -> list[LiveRequest]:
        """The live requests on a worker, oldest first."""
        return [request for request in self._requests.values() if request.device == device]

    def silent_since(self, before_s: float) -> list[LiveRequest]:
        """The live requests whose clients have heard nothing since then, oldest first."""
        return [one for one in self._requests.values() if one.last_sign_s < before_s]

    def all(self) -> list[LiveRequest]:
        """Every live request, oldest first."""
        return list(self._requests.values())
