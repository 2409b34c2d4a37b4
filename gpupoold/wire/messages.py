"""Everything that crosses a process boundary, as tagged msgspec structs.

Conversations of the daemon with its instances, its frontends and its fork server, all over unix
stream sockets framed by :mod:`gpupoold.wire.codec`. A field named
``frames`` holds buffers encoded by vLLM's own serialiser; the daemon forwards
them unread. Times ending in ``_s`` that are instants are ``time.monotonic()``
of this machine, which all processes share.
"""

from __future__ import annotations

from gpupoold.domain import Priority
from gpupoold.latency.stored import Profile
from gpupoold.wire.base import Message as Message
from gpupoold.wire.messages_access import (
    AccessReport as AccessReport,
    AccessRules as AccessRules,
    AskRate as AskRate,
    KeyRecord as KeyRecord,
    RateAnswer as RateAnswer,
)
from gpupoold.wire.records import (
    LoadedModel as LoadedModel,
    ModelMemory as ModelMemory,
    ModelToLoad as ModelToLoad,
    Parcel as Parcel,
    RequestProgress as RequestProgress,
    ServedModel as ServedModel,
    SwitchRecord as SwitchRecord,
)

# daemon → instance


class LoadModel(Message):
    """Load a model; with ``has_image`` one descriptor (the image's memfd) comes along.

    ``canary`` is what the model with that image answers to a fixed prompt, empty if that is
    not known. ``profiling_budget_s`` is how long its steps may be timed afterwards; 0: they
    are known.
    """

    model: ModelToLoad
    has_image: bool = False
    layout_digest: str = ""
    profiling_budget_s: float = 0.0
    canary: tuple[int, ...] = ()


class UnloadModel(Message):
    """Drop a model; its live requests must have ended before."""

    name: str


class DropImage(Message):
    """Let the image of a model without requests go; its engine stays. Answered by
    ``ImageDropped``."""

    model: str


class TakeImage(Message):
    """Have the image of a model again: the memfd that comes along, of the layout that the
    model's engine has. Answered by ``ImageTaken``."""

    model: str


class SetTargets(Message):
    """New targets for a model, from the next turn on."""

    name: str
    ttft_s: float
    tbt_s: float


class AddRequest(Message):
    """A request for a model (frontend → daemon → instance); ``frames`` have it as vLLM encodes it.

    ``output_token_ids`` are the tokens that its client has from another instance. One that
    ``is_moving`` is answered by ``Adopted`` when it can go on; its KV is in ``parcel``, or has to
    be computed anew. ``key_id``: of the API key that it came with, empty without one.
    ``frontend``: the number of the frontend that it came from, which the daemon fills in. One
    that ``is_isolated`` shares no step with others until ``EndIsolation``.
    """

    model: str
    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    frames: list[bytes]
    output_token_ids: list[int] = []
    is_moving: bool = False
    parcel: Parcel | None = None
    key_id: str = ""
    priority: Priority = Priority.NORMAL
    frontend: int = 0
    is_isolated: bool = False


class EndIsolation(Message):
    """A request may share steps with others again (daemon → instance)."""

    model: str
    request_id: str


class AbortRequests(Message):
    """The client went away or the daemon gave up (frontend → daemon → instance)."""

    model: str
    request_ids: list[str]


class RunTurn(Message):
    """What the device does now, and the model whose turn is next: to be made ready meanwhile.

    A ``turn_id`` that is under way goes on, with the new ``quota_s`` and ``then``; one that
    has ended is old news. ``model`` None: no turn. ``then`` None: the turn goes on past its
    quota. When a turn ends the device makes ready for ``then`` without waiting for orders.
    ``chunk_tokens``: of one step at most, prompt tokens and one for each answer.
    """

    turn_id: int
    model: str | None
    quota_s: float
    then: str | None = None
    chunk_tokens: int | None = None


class MoveOut(Message):
    """Let a request go, with its KV; answered by ``Moved``."""

    model: str
    request_id: str


class PeerHost(Message):
    """The host cache of another instance, whose memfd comes along, for parcels from there. It
    takes the place of one that the other had when it ran before."""

    instance: int
    num_bytes: int


class PeerDown(Message):
    """An instance has died: what had not arrived from there never will."""

    instance: int


class FreeParcel(Message):
    """Nobody needs the bytes of a parcel any more."""

    parcel_id: str


class Call(Message):
    """A named operation with msgpack-encodable arguments; answered by ``CallResult``."""

    call_id: int
    method: str
    args: dict[str, object] = {}


class CallResult(Message):
    """The answer to a ``Call``; ``error_code`` is set when it failed."""

    call_id: int
    result: object = None
    error_code: str = ""
    error_message: str = ""
    error_hint: str = ""


class Shutdown(Message):
    """Finish the step in progress and exit."""


# instance → daemon


class InstanceReady(Message):
    """The instance owns its device and can load models. With ``shares_kv_host`` the memfd of its
    KV host cache comes along.

    ``bandwidth_bytes_per_s`` is that of a switch, with mapping; the link's own are for copies
    to and from the device. ``kv_host_bytes`` is the size of its KV host cache; None: as much
    as it takes.
    """

    instance: int
    pid: int
    device_bytes: int
    page_bytes: int
    bandwidth_bytes_per_s: float
    engine_version: str
    device_name: str = ""
    kv_host_bytes: int | None = None
    link_in_bytes_per_s: float = 0.0
    link_out_bytes_per_s: float = 0.0
    shares_kv_host: bool = False


class ModelLoaded(Message):
    """A model is ready to serve; with ``has_image`` its image's memfd comes along.

    ``profile`` is what timing its steps gave, None when that was not asked for; ``canary``
    what it answered to a fixed prompt, empty when it generates no text. ``image_problem``
    says why the image that came with the order was not used.
    """

    model: LoadedModel
    layout_digest: str
    has_image: bool = False
    profile: Profile | None = None
    canary: tuple[int, ...] = ()
    image_problem: str = ""


class ModelFailed(Message):
    """Loading failed; the error is for the user."""

    name: str
    error_code: str
    message: str
    hint: str = ""


class ModelUnloaded(Message):
    """The model's pages, regions and engine are gone."""

    name: str


class ImageDropped(Message):
    """The instance has no view of the model's image any more."""

    model: str


class ImageTaken(Message):
    """The model can run again; or ``problem`` says why it cannot."""

    model: str
    problem: str = ""


class StepOutputs(Message):
    """What one engine step produced (instance → daemon → frontend).

    ``frames`` is empty when a device without an engine made the tokens: ``progress`` has
    them. ``step_s`` is the time of a pure decode step, None when the step prefilled.
    ``frame_counts`` says how many of the frames are for each frontend, by its number and in
    the frames' order; empty: all frames are for one frontend. Each frontend is sent its own
    frames and the progress of its own requests.
    """

    model: str
    at_s: float
    frames: list[bytes]
    progress: list[RequestProgress]
    step_s: float | None = None
    frame_counts: dict[int, int] = {}


class Moved(Message):
    """A request that was to go has gone; all its tokens so far were told before.

    ``is_known`` is false if it was not there. ``parcel`` None: its KV did not come along.
    """

    model: str
    request_id: str
    is_known: bool = True
    parcel: Parcel | None = None


class Adopted(Message):
    """A request that was moving can go on here."""

    model: str
    request_id: str


class ParcelUsed(Message):
    """A parcel is not needed any more by whom it was for."""

    parcel_id: str
    source: int


class MemoryChanged(Message):
    """What a device would have to move to run a model has changed, between ends of turns.

    ``missing_bytes`` has the bytes for every model for which they are not as they were last
    told.
    """

    missing_bytes: dict[str, int]


class TurnEnded(Message):
    """A turn is over: its quota used while another model waits, or nothing left to do.

    ``missing_bytes``: as in ``MemoryChanged``.

    ``model`` is whose turn it was, ``began_s`` when it could run, None if it never did, and
    ``ended_s`` when it was over.
    """

    turn_id: int
    missing_bytes: dict[str, int] = {}
    model: str = ""
    began_s: float | None = None
    ended_s: float = 0.0


class Switched(Message):
    """A switch happened.

    ``bandwidth_bytes_per_s`` is what switches of the instance reach by now, mapping included, a
    moving average; 0: the instance does not measure it.
    """

    switch: SwitchRecord
    bandwidth_bytes_per_s: float = 0.0


class WrongAnswer(Message):
    """A model that has served gives another answer to the canary's prompt than it did: its
    bytes are wrong. Its requests here have ended."""

    model: str
    expected: tuple[int, ...]
    answered: tuple[int, ...]


class InstanceStatus(Message):
    """Sent a few times a second: proof of life and what ``gpupool ps`` shows.

    ``turn_began_s`` is when the model on its turn could run, None while it is being brought in.
    ``prefetched_bytes`` of weights were brought in for a turn that is still to come.
    """

    instance: int
    at_s: float
    on_turn: str | None
    quota_s: float
    num_steps: int
    free_bytes: int
    kv_host_bytes: int
    models: list[ModelMemory]
    num_recomputed: int = 0
    turn_began_s: float | None = None
    prefetched_bytes: int = 0


# daemon → instance, daemon → frontend


class Reconfigure(Message):
    """The configuration has changed; each heeds what it has a use for.

    ``max_live_requests``: of one model. ``max_bytes_in_flight``: of this frontend.
    """

    log_level: str
    canary_interval: int
    max_body_bytes: int
    max_live_requests: int
    max_bytes_in_flight: int


# daemon ↔ frontend


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
    """Requests that cannot be answered (instance → daemon → frontend); their streams end so."""

    model: str
    request_ids: list[str]
    message: str


class Admission(Message):
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


class Fork(Message):
    """Start a module (daemon → fork server).

    With it come the descriptors of its log and of each of ``fd_options``.
    """

    call_id: int
    module: str
    arguments: list[str]
    fd_options: list[str]
    environment: dict[str, str]


class Forked(Message):
    """It runs (fork server → daemon). With it comes a pidfd."""

    call_id: int
    pid: int


class ForkFailed(Message):
    """It could not be started, for this reason; nothing of it runs (fork server → daemon)."""

    call_id: int
    reason: str


class KillForked(Message):
    """Kill a forked process (daemon → fork server): its pidfd did not reach the daemon."""

    pid: int


class ForkEnded(Message):
    """Exit status of a forked process, negative for a signal (fork server → daemon)."""

    pid: int
    status: int


ToInstance = (
    LoadModel
    | UnloadModel
    | DropImage
    | TakeImage
    | SetTargets
    | AddRequest
    | AbortRequests
    | EndIsolation
    | RunTurn
    | MoveOut
    | PeerHost
    | PeerDown
    | FreeParcel
    | Call
    | Reconfigure
    | Shutdown
)
FromInstance = (
    InstanceReady
    | ModelLoaded
    | ModelFailed
    | ModelUnloaded
    | ImageDropped
    | ImageTaken
    | StepOutputs
    | Moved
    | Adopted
    | ParcelUsed
    | MemoryChanged
    | TurnEnded
    | Switched
    | WrongAnswer
    | InstanceStatus
    | RequestsFailed
    | CallResult
)
ToFrontend = (
    ModelList
    | ServeModel
    | StopServing
    | Admission
    | StepOutputs
    | RequestsFailed
    | CallResult
    | MetricsText
    | Ping
    | AccessRules
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
    | AskRate
    | AccessReport
)
ToForkServer = Fork | KillForked
FromForkServer = Forked | ForkFailed | ForkEnded
