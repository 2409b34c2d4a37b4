"""Records of live requests. Pure bookkeeping."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpupoold.domain import Targets


@dataclass(slots=True)
class LiveRequest:
    """A request from arrival to end; the record survives the engines.

    ``device`` is None until a worker has the request.
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
    """Number of tokens that met their deadline, as fixed at arrival."""
    late_s: float = 0.0
    """Lateness of the latest token in seconds."""
    warmed_s: float | None = None
    """Time when the model was in host memory, if the request had to wait."""
    key_id: str = ""
    """Id of the API key."""
    frontend: int = 0
    """Number of the frontend."""
    num_bytes: int = 0
    """Bytes of the request in the encoding for workers."""

    def add_tokens(self, token_ids: Sequence[int], at_s: float) -> None:
        """Add tokens sent at ``at_s``."""
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
        """Time of the latest token, or else of the arrival."""
        return self.token_times_s[-1] if self.token_times_s else self.arrival_s

    @property
    def next_deadline_s(self) -> float:
        """Deadline of the next token."""
        return self.targets.deadline_s(self.arrival_s, len(self.token_times_s))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, None before the token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]


_API_PREFIXES = ("chatcmpl-", "cmpl-")


def request_id_of(text: str) -> str:
    """Return the internal id for the ``id`` of an answer, without the API's prefix."""
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
        """Add a request.

        Raises:
            ValueError: another live request has the same id; nothing has changed.
        """
        if request.request_id in self._requests:
            raise ValueError(f"another live request is called {request.request_id}")
        self._requests[request.request_id] = request
        self._num_by_model[request.model] += 1
        self._num_by_key[request.key_id] += 1
        self._bytes_by_key[request.key_id] += request.num_bytes

    def get(self, request_id: str) -> LiveRequest | None:
        """Return the request, None after its end."""
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> LiveRequest | None:
        """Remove and return the request, None if it has ended before."""
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
        """Return the number of live requests of an API key; "" means without a key."""
        return self._num_by_key[key_id]

    @property
    def num_bytes(self) -> int:
        """Bytes of all live requests in the encoding for workers."""
        return self._bytes_by_key.total()

    def bytes_of_key(self, key_id: str) -> int:
        """Return the bytes of live requests of an API key; "" means without a key."""
        return self._bytes_by_key[key_id]

    def of_model(self, model: str) -> list[LiveRequest]:
        """A model's live requests, oldest first."""
        return [request for request in self._requests.values() if request.model == model]

    def of_frontend(self, number: int) -> list[LiveRequest]:
        """Return the live requests of a frontend, oldest first."""
        return [request for request in self._requests.values() if request.frontend == number]

    def on_device(self, device: int) -> list[LiveRequest]:
        """The live requests on a worker, oldest first."""
        return [request for request in self._requests.values() if request.device == device]

    def silent_since(self, before_s: float) -> list[LiveRequest]:
        """Return the live requests without a token or arrival since ``before_s``, oldest first."""
        return [one for one in self._requests.values() if one.last_sign_s < before_s]

    def all(self) -> list[LiveRequest]:
        """Every live request, oldest first."""
        return list(self._requests.values())
