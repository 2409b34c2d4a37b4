"""All messages between processes, as tagged msgspec structs.

The daemon talks to workers, frontends and the fork server over unix stream sockets with the framing
of :mod:`gpupoold.wire.channel`. A field named ``frames`` holds buffers in the encoding of vLLM's
serialiser; the daemon forwards the buffers unread. Instants that end in ``_s`` are
``time.monotonic()`` of this machine, common to all processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.api_keys import KeyPowers
from gpupoold.wire.messages_worker import (
    AbortRequests as AbortRequests,
    AddRequest as AddRequest,
    Call as Call,
    CallResult as CallResult,
    DropSnapshot as DropSnapshot,
    EndIsolation as EndIsolation,
    EndTurn as EndTurn,
    ForgetPrefixes as ForgetPrefixes,
    GraphsCaptured as GraphsCaptured,
    KvTransferUsed as KvTransferUsed,
    LoadModel as LoadModel,
    MemoryReport as MemoryReport,
    Migrated as Migrated,
    MigrateOut as MigrateOut,
    ModelFailed as ModelFailed,
    ModelLoaded as ModelLoaded,
    ModelUnloaded as ModelUnloaded,
    PeerDown as PeerDown,
    PeerHost as PeerHost,
    PrefixPeer as PrefixPeer,
    ReleaseKvTransfer as ReleaseKvTransfer,
    RequestAttached as RequestAttached,
    RunTurn as RunTurn,
    SetTargets as SetTargets,
    Shutdown as Shutdown,
    SnapshotDropped as SnapshotDropped,
    SnapshotTaken as SnapshotTaken,
    StepOutputs as StepOutputs,
    Switched as Switched,
    TakeSnapshot as TakeSnapshot,
    TurnReport as TurnReport,
    UnloadModel as UnloadModel,
    WorkerReady as WorkerReady,
    WorkerStatus as WorkerStatus,
    WrongAnswer as WrongAnswer,
)
from gpupoold.wire.records import (
    DraftCounts as DraftCounts,
    EngineMemory as EngineMemory,
    FirstToken as FirstToken,
    KvTransfer as KvTransfer,
    LoadedModel as LoadedModel,
    LoadProgress as LoadProgress,
    Message as Message,
    ModelMemory as ModelMemory,
    ModelToLoad as ModelToLoad,
    RequestProgress as RequestProgress,
    RequestWait as RequestWait,
    ServedModel as ServedModel,
    SwitchRecord as SwitchRecord,
)


@dataclass(frozen=True)
class KeyRecord(KeyPowers):
    """A key that may be valid; times in wall-clock seconds.

    ``previous_digest`` is valid until ``previous_until``. If ``is_rate_limited``, the daemon must
    permit each request, see ``AskRate``.
    """

    id: str
    name: str
    digest: str
    previous_digest: str = ""
    previous_until: float = 0.0


class AccessRules(Message):
    """Rules of access (daemon → frontend); replace all earlier rules.

    ``host_names`` are hosts in lower case, besides loopback, for requests without a key. With
    ``share_prefixes``, requests use cached KV of requests of other keys. ``allowed_origins`` are
    the origins of other sites whose pages have access; ``*`` means all.
    """

    keys: list[KeyRecord]
    are_required: bool
    host_names: tuple[str, ...] = ()
    share_prefixes: bool = False
    allowed_origins: tuple[str, ...] = ()


class FleetSecret(Message):
    """The secret of the daemon's fleet, empty without a fleet (daemon → frontend).

    ``downloads`` is the folder of downloaded checkpoints, for other nodes.
    """

    secret: str
    downloads: str


class AccessReport(Message):
    """Number of requests without a valid key since the last report (frontend → daemon).

    Sent about once a second.
    """

    num_unauthorised: int


class AskRate(Message):
    """A request for permission to begin an HTTP request with a key (frontend → daemon).

    Sent for keys that are ``is_rate_limited``; answered by ``RateAnswer``. A permitted request is
    counted.
    """

    call_id: int
    key_id: str


class RateAnswer(Message):
    """The HTTP request may begin if ``wait_s`` is 0; else ``limit``, such as "3 requests per
    minute", was reached and a request may begin in ``wait_s`` seconds."""

    call_id: int
    limit: str = ""
    wait_s: float = 0.0


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


ToWorker = (
    LoadModel
    | UnloadModel
    | DropSnapshot
    | TakeSnapshot
    | SetTargets
    | AddRequest
    | AbortRequests
    | EndIsolation
    | RunTurn
    | EndTurn
    | MigrateOut
    | PeerHost
    | PrefixPeer
    | PeerDown
    | ReleaseKvTransfer
    | ForgetPrefixes
    | Call
    | Reconfigure
    | Shutdown
)
FromWorker = (
    WorkerReady
    | ModelLoaded
    | ModelFailed
    | ModelUnloaded
    | GraphsCaptured
    | SnapshotDropped
    | SnapshotTaken
    | StepOutputs
    | Migrated
    | RequestAttached
    | KvTransferUsed
    | MemoryReport
    | TurnReport
    | Switched
    | WrongAnswer
    | WorkerStatus
    | RequestsFailed
    | CallResult
)
ToFrontend = (
    ModelList
    | ServeModel
    | StopServing
    | AdmissionAnswer
    | StepOutputs
    | RequestsFailed
    | GrammarRefused
    | CallResult
    | MetricsText
    | FirstTokens
    | Waits
    | Ping
    | AccessRules
    | FleetSecret
    | RateAnswer
    | Accept
    | Reconfigure
    | Shutdown
)
FromFrontend = (
    FrontendReady
    | Accepting
    | AddRequest
    | AbortRequests
    | CallResult
    | Pong
    | AskMetrics
    | AskWaits
    | AskRate
    | AccessReport
    | BatchWaits
)


class Fork(Message):
    """Start a module (daemon → fork server).

    Carries the descriptors of the log and of each of ``fd_options``.
    """

    call_id: int
    module: str
    arguments: list[str]
    fd_options: list[str]
    environment: dict[str, str]


class Forked(Message):
    """The module runs (fork server → daemon). Carries a pidfd."""

    call_id: int
    pid: int


class ForkFailed(Message):
    """The module could not be started; no process is left (fork server → daemon)."""

    call_id: int
    reason: str


class KillForked(Message):
    """Kill a forked process (daemon → fork server) whose pidfd did not reach the daemon."""

    pid: int


class ForkEnded(Message):
    """Exit status of a forked process, negative for a signal (fork server → daemon)."""

    pid: int
    status: int


ToForkServer = Fork | KillForked
FromForkServer = Forked | ForkFailed | ForkEnded


class Inspect(Message):
    """Check a model for an emulated device or a GPU, and for groups of ``degrees`` GPUs (daemon →
    inspection).

    With ``only_chat`` only the tokenizer and the chat template are checked.
    """

    model: ModelToLoad
    is_emulated: bool
    degrees: tuple[int, ...] = ()
    only_chat: bool = False


class Survey(Message):
    """Read and check the files of a checkpoint (daemon → inspection).

    With ``may_be_remote`` the weights may be beginnings that a download fetched.
    """

    path: str
    dtype: str
    engine: dict[str, str]
    allow_pickle: bool
    allow_remote_code: bool
    may_be_remote: bool = False


class SurveyAdapter(Message):
    """Read and check the files of an adapter for the checkpoint ``base`` (daemon → inspection)."""

    path: str
    base: str
    allow_pickle: bool


class FindParsers(Message):
    """Find the parsers and the chat template of a checkpoint (daemon → inspection)."""

    path: str
    engine: dict[str, str]


class Inspected(Message):
    """The result of an inspection; ``error_code`` is set if the model cannot be served.

    ``undivided`` has the degrees of groups that cannot divide the model, with the reason.
    ``result`` is what a survey or a search found, in the encoding of
    :mod:`gpupoold.checkpoints.survey`.
    """

    error_code: str = ""
    error_message: str = ""
    error_hint: str = ""
    undivided: dict[int, str] = {}
    result: bytes = b""


ToInspection = Inspect | Survey | SurveyAdapter | FindParsers
