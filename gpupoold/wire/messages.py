"""All messages between processes, as tagged msgspec structs.

The daemon talks to workers, frontends and the fork server over unix stream sockets with the framing
of :mod:`gpupoold.wire.codec`. A field named ``frames`` holds buffers in the encoding of vLLM's
serialiser; the daemon forwards the buffers unread. Instants that end in ``_s`` are
``time.monotonic()`` of this machine, common to all processes.
"""

from __future__ import annotations

from gpupoold.wire.base import Message as Message
from gpupoold.wire.messages_access import (
    AccessReport as AccessReport,
    AccessRules as AccessRules,
    AskRate as AskRate,
    FleetSecret as FleetSecret,
    KeyRecord as KeyRecord,
    RateAnswer as RateAnswer,
)
from gpupoold.wire.messages_fork import (
    Fork as Fork,
    Forked as Forked,
    ForkEnded as ForkEnded,
    ForkFailed as ForkFailed,
    KillForked as KillForked,
)
from gpupoold.wire.messages_from_worker import (
    KvTransferUsed as KvTransferUsed,
    MemoryReport as MemoryReport,
    Migrated as Migrated,
    ModelFailed as ModelFailed,
    ModelLoaded as ModelLoaded,
    ModelUnloaded as ModelUnloaded,
    RequestAttached as RequestAttached,
    SnapshotDropped as SnapshotDropped,
    SnapshotTaken as SnapshotTaken,
    StepOutputs as StepOutputs,
    Switched as Switched,
    TurnReport as TurnReport,
    WorkerReady as WorkerReady,
    WorkerStatus as WorkerStatus,
    WrongAnswer as WrongAnswer,
)
from gpupoold.wire.messages_frontend import (
    Accept as Accept,
    Accepting as Accepting,
    AdmissionAnswer as AdmissionAnswer,
    AskMetrics as AskMetrics,
    AskWaits as AskWaits,
    BatchWaits as BatchWaits,
    FirstTokens as FirstTokens,
    FrontendReady as FrontendReady,
    GrammarRefused as GrammarRefused,
    MetricsText as MetricsText,
    ModelList as ModelList,
    Ping as Ping,
    Pong as Pong,
    Reconfigure as Reconfigure,
    RequestsFailed as RequestsFailed,
    ServeModel as ServeModel,
    StopServing as StopServing,
    Waits as Waits,
)
from gpupoold.wire.messages_inspection import (
    FindParsers as FindParsers,
    Inspect as Inspect,
    Inspected as Inspected,
    Survey as Survey,
    SurveyAdapter as SurveyAdapter,
    ToInspection as ToInspection,
)
from gpupoold.wire.messages_to_worker import (
    AbortRequests as AbortRequests,
    AddRequest as AddRequest,
    Call as Call,
    CallResult as CallResult,
    DropSnapshot as DropSnapshot,
    EndIsolation as EndIsolation,
    EndTurn as EndTurn,
    ForgetPrefixes as ForgetPrefixes,
    LoadModel as LoadModel,
    MigrateOut as MigrateOut,
    PeerDown as PeerDown,
    PeerHost as PeerHost,
    PrefixPeer as PrefixPeer,
    ReleaseKvTransfer as ReleaseKvTransfer,
    RunTurn as RunTurn,
    SetTargets as SetTargets,
    Shutdown as Shutdown,
    TakeSnapshot as TakeSnapshot,
    UnloadModel as UnloadModel,
)
from gpupoold.wire.records import (
    DraftCounts as DraftCounts,
    EngineMemory as EngineMemory,
    FirstToken as FirstToken,
    KvTransfer as KvTransfer,
    LoadedModel as LoadedModel,
    LoadProgress as LoadProgress,
    ModelMemory as ModelMemory,
    ModelToLoad as ModelToLoad,
    RequestProgress as RequestProgress,
    RequestWait as RequestWait,
    ServedModel as ServedModel,
    SwitchRecord as SwitchRecord,
)

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
ToForkServer = Fork | KillForked
FromForkServer = Forked | ForkFailed | ForkEnded
