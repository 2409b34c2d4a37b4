"""Messages between the daemon and a frontend, and configuration for both kinds of process."""

from __future__ import annotations

from gpupoold.wire.base import Message
from gpupoold.wire.records import (
    LoadedModel,
    ModelToLoad,
    ServedModel,
)


class Reconfigure(Message):
    """The configuration has changed; each heeds what it has a use for.

    ``max_live_requests``: of one model. ``max_bytes_in_flight``: of this frontend.
    """

    log_level: str
    self_check_interval: int
    max_body_bytes: int
    max_live_requests: int
    max_bytes_in_flight: int


class FrontendReady(Message):
    """The frontend follows the daemon's messages; it accepts no connections yet."""

    pid: int


class Accept(Message):
    """Accept connections from now on (daemon → frontend). Answered by ``Accepting``."""


class Accepting(Message):
    """The frontend accepts connections on the socket that it was given."""


class ModelList(Message):
    """All registered models with their states; replaces the list sent before."""

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
    """Is it there? Answered by ``Pong``."""


class Pong(Message):
    """It is there. Its event loop came so much too late since it said so last, each time that
    this was measured."""

    lags_s: list[float] = []


class AskMetrics(Message):
    """What is to be told at ``/metrics`` (frontend → daemon)? Answered by ``MetricsText``."""

    call_id: int


class MetricsText(Message):
    """The metrics in Prometheus' text format."""

    call_id: int
    text: bytes


class RequestsFailed(Message):
    """Requests that cannot be answered (worker → daemon → frontend); their streams end so."""

    model: str
    request_ids: list[str]
    message: str


class AdmissionAnswer(Message):
    """The answer to an ``AddRequest``, before anything else about the request (daemon →
    frontend): ``status`` 200 if it is taken.

    Else it is the HTTP status of the refusal, ``message`` is for the client, and
    ``retry_after_s`` says how long it is to wait.
    """

    model: str
    request_id: str
    status: int = 200
    message: str = ""
    retry_after_s: float = 0.0
