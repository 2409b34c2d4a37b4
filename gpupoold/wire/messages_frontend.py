"""Messages between the daemon and a frontend, and configuration for both kinds of process."""

from __future__ import annotations

from gpupoold.wire.base import Message
from gpupoold.wire.records import FirstToken, LoadedModel, ModelToLoad, RequestWait, ServedModel


class Reconfigure(Message):
    """A changed configuration; a receiver uses the fields that concern its process.

    ``max_live_requests`` is per model, ``max_bytes_in_flight`` per frontend. ``wait_comments_s`` is
    the interval of comments in waiting streams, 0 for none.
    """

    log_level: str
    self_check_interval: int
    max_body_bytes: int
    max_live_requests: int
    max_bytes_in_flight: int
    wait_comments_s: float = 0.0


class FrontendReady(Message):
    """The frontend handles messages, but accepts no connections yet."""

    pid: int


class Accept(Message):
    """Accept connections from now on (daemon → frontend). Answered by ``Accepting``."""


class Accepting(Message):
    """The frontend accepts connections on the passed socket."""


class ModelList(Message):
    """All registered models with states; replaces the previous list."""

    models: list[ServedModel]
    ready: bool


class ServeModel(Message):
    """Mount the API of a loaded model; answered by ``CallResult`` with ``call_id``."""

    call_id: int
    model: ModelToLoad
    loaded: LoadedModel


class StopServing(Message):
    """Unmount a model's API; streams still open end with an error."""

    name: str


class Ping(Message):
    """A check that the frontend's event loop runs; answered by ``Pong``."""


class Pong(Message):
    """Reply to ``Ping``, with what happened since the last ``Pong``.

    ``lags_s``: samples of the event loop's lag in seconds. ``paced_gaps``: histograms of the times
    between tokens of paced streams by model, as text.
    """

    lags_s: list[float] = []
    paced_gaps: dict[str, str] = {}


class FirstTokens(Message):
    """How requests waited for a first token (daemon → frontend), sent before that token."""

    requests: list[FirstToken]


class AskWaits(Message):
    """A request for the waits of requests without a first token (frontend → daemon).

    Answered by ``Waits``, perhaps in parts.
    """

    request_ids: list[str]


class Waits(Message):
    """The waits of requests; requests that do not wait any longer are missing.

    Requests whose model is being brought to host memory have the place 0.
    """

    waits: list[RequestWait]


class BatchWaits(Message):
    """Requests of a batch begin to wait for a further try (frontend → daemon).

    ``key_id`` is the id of the batch's API key, empty without one.
    """

    batch_id: str
    key_id: str
    reason: str


class AskMetrics(Message):
    """A request for the text of ``/metrics`` (frontend → daemon), answered by ``MetricsText``."""

    call_id: int


class MetricsText(Message):
    """The metrics in Prometheus' text format."""

    call_id: int
    text: bytes


class RequestsFailed(Message):
    """Requests that failed (worker → daemon → frontend); their streams end.

    ``status`` is the HTTP status. ``code`` names a failure that a further try would only repeat; a
    failure without a code may be of the moment. ``grammar`` is the digest of the requests' grammar
    if the grammar was the cause.
    """

    model: str
    request_ids: list[str]
    message: str
    status: int = 503
    code: str = ""
    grammar: str = ""


class GrammarRefused(Message):
    """A grammar has exceeded a bound in a worker (daemon → all frontends).

    The frontends refuse further requests of the API key with the grammar; see
    :func:`gpupoold.grammar_backends.grammar_digest`.
    """

    model: str
    key_id: str
    grammar: str
    reason: str


class AdmissionAnswer(Message):
    """The answer to an ``AddRequest``, before any other message about the request.

    Sent from daemon to frontend. ``status`` 200 means admitted. Otherwise ``status`` is the HTTP
    status of the refusal, ``message`` is for the client, and ``retry_after_s`` is the waiting time.
    """

    model: str
    request_id: str
    status: int = 200
    message: str = ""
    retry_after_s: float = 0.0
