"""Messages between the daemon and its workers, in both directions."""

from __future__ import annotations

import msgspec

from gpupoold.domain import DeviceActivity, DeviceFacts, Priority
from gpupoold.durations import GraphSizes, LoadStages
from gpupoold.latency.models import Profile
from gpupoold.wire import records


class LoadModel(records.Message):
    """Load a model; with ``has_snapshot`` the message carries the snapshot's memfd.

    The engine of a loaded model serves until the load has ended, and is then replaced.

    ``self_check`` has the expected tokens of the self-check with that snapshot, empty if unknown.
    ``profiling_budget_s`` is the time for measuring steps afterwards, 0 if the steps are known.
    ``kv_identity`` is a digest of all that decides on the values of the model's KV: engines of one
    identity use each other's prefixes. Empty if unknown.
    """

    model: records.ModelToLoad
    has_snapshot: bool = False
    layout_digest: str = ""
    profiling_budget_s: float = 0.0
    self_check: tuple[int, ...] = ()
    kv_identity: str = ""


class ForgetPrefixes(records.Message):
    """Free the KV of ended requests of a model that is removed, of all its former engines."""

    model: str


class UnloadModel(records.Message):
    """Remove a model, whose requests have ended before.

    With ``keeps_engine`` the engine stays for some seconds: the next load takes it over if its
    model is of the same family, and closes it otherwise.
    """

    name: str
    keeps_engine: bool = False


class DropSnapshot(records.Message):
    """Release the snapshot of a model without requests; the engine stays.

    Answered by ``SnapshotDropped``.
    """

    model: str


class TakeSnapshot(records.Message):
    """Attach the snapshot of a model; the message carries a memfd in the engine's layout.

    Answered by ``SnapshotTaken``.
    """

    model: str


class SetTargets(records.Message):
    """Set a model's targets, from the next turn on."""

    name: str
    ttft_s: float
    tbt_s: float


class AddRequest(records.Message):
    """A request for a model (frontend → daemon → worker); ``frames`` in vLLM's encoding.

    ``output_token_ids`` are tokens that the client has from another worker. If ``is_moving``, the
    worker sends ``RequestAttached`` when the request can continue; the KV is in ``kv_transfer`` or
    is recomputed. ``key_id`` is the id of the API key or empty. The daemon fills ``frontend`` in
    with the number of the sending frontend. A request that ``is_isolated`` shares no step with
    other requests until ``EndIsolation``. ``served_name`` is the name of the adapter or preset,
    empty for the model itself.
    """

    model: str
    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    frames: list[bytes]
    output_token_ids: list[int] = []
    is_moving: bool = False
    kv_transfer: records.KvTransfer | None = None
    key_id: str = ""
    priority: Priority = Priority.NORMAL
    frontend: int = 0
    is_isolated: bool = False
    served_name: str = ""

    @property
    def counted_name(self) -> str:
        """The name under which the request is counted: its preset's, adapter's or model's."""
        return self.served_name or self.model

    @property
    def is_background(self) -> bool:
        """True if the request is of a batch, and runs in time that others leave."""
        return self.priority is Priority.BACKGROUND


class EndIsolation(records.Message):
    """Run a request in steps with other requests again (daemon → worker)."""

    model: str
    request_id: str


class AbortRequests(records.Message):
    """End requests: the client has left or the daemon aborts (frontend → daemon → worker)."""

    model: str
    request_ids: list[str]


class RunTurn(records.Message):
    """The present turn of the device, and the next model, to be prefetched meanwhile.

    A running ``turn_id`` continues with the new ``quota_s`` and ``then``; the worker ignores a
    ``turn_id`` that has ended. With ``then`` None the turn continues past its quota. At the end of
    a turn the device prepares for ``then`` without waiting for orders. ``chunk_tokens`` bounds one
    step: prompt tokens plus one per answer.
    """

    turn_id: int
    model: str
    quota_s: float
    then: str | None = None
    chunk_tokens: int | None = None


class EndTurn(records.Message):
    """End the present turn, if any, after its step; no turn follows until ``RunTurn``."""


class MigrateOut(records.Message):
    """Migrate a request out with its KV; answered by ``Migrated``."""

    model: str
    request_id: str


class PeerHost(records.Message):
    """The host cache of another worker, for KV transfers; carries the cache's memfd.

    Replaces the host cache of that worker's previous process.
    """

    device: int
    num_bytes: int


class PrefixPeer(records.Message):
    """Another worker's KV of ended requests, for copies; carries the memfd of its host cache.

    Replaces the host cache of that worker's previous process.
    """

    device: int


class PeerDown(records.Message):
    """A worker has died; KV transfers from that worker that have not arrived are lost."""

    device: int


class ReleaseKvTransfer(records.Message):
    """Free the bytes of a KV transfer."""

    transfer_id: str


class Call(records.Message):
    """A named operation with msgpack-encodable arguments; answered by ``CallResult``."""

    call_id: int
    method: str
    args: dict[str, object] = {}


class CallResult(records.Message):
    """The answer to a ``Call``; ``error_code`` is set after a failure."""

    call_id: int
    result: object = None
    error_code: str = ""
    error_message: str = ""
    error_hint: str = ""


class Shutdown(records.Message):
    """Finish the step in progress and exit; after ``grace_s`` seconds the process is killed."""

    grace_s: float = 5.0


class WorkerReady(records.Message):
    """The worker owns its device and can load models.

    With ``shares_kv_host`` the message carries the memfd of the KV host cache.
    ``reserve_free_bytes`` is the device's free memory outside the pages, None if unknown.
    """

    facts: DeviceFacts
    engine_version: str
    device_name: str = ""
    shares_kv_host: bool = False
    reserve_free_bytes: int | None = None


class ModelLoaded(records.Message):
    """A model is ready to serve; with ``has_snapshot`` the message carries the snapshot's memfd.

    ``profile`` has the measured step times, None if not requested. ``self_check`` has the tokens of
    the self-check, empty if the model generates no text. ``snapshot_problem`` is the reason why the
    snapshot in the order was not used. ``dropped`` are the requests of a replaced engine, which the
    daemon sends again. ``memory`` is the engine's memory outside the pages, ``stages`` the time of
    the load. ``engine_of`` is the former model of the engine that a kept engine has become. Models
    of one ``family`` can take over each other's engines; empty if no model can, because of
    ``why_unshared``. ``resident_bytes`` of the weights had stayed on the device, and were not
    copied.
    """

    model: records.LoadedModel
    layout_digest: str
    has_snapshot: bool = False
    profile: Profile | None = None
    self_check: tuple[int, ...] = ()
    snapshot_problem: str = ""
    dropped: list[str] = []
    memory: records.EngineMemory = records.EngineMemory()
    stages: LoadStages = msgspec.field(default_factory=LoadStages)
    engine_of: str = ""
    family: str = ""
    resident_bytes: int = 0
    why_unshared: str = ""
    graphs: GraphSizes = GraphSizes()


class GraphsCaptured(records.Message):
    """Graphs of a further size have been captured in an idle moment."""

    model: str
    graphs: GraphSizes


class ModelFailed(records.Message):
    """Loading failed; the error is for the user."""

    name: str
    error_code: str
    message: str
    hint: str = ""


class ModelUnloaded(records.Message):
    """The model's pages are freed, and its engine and address ranges unless the engine is kept.

    ``freed`` is the memory outside the pages that the process has given back.
    """

    name: str
    freed: records.EngineMemory = records.EngineMemory()
    is_engine_kept: bool = False


class SnapshotDropped(records.Message):
    """The worker has unmapped the model's snapshot."""

    model: str


class SnapshotTaken(records.Message):
    """The model can run again, or cannot for the reason in ``problem``."""

    model: str
    problem: str = ""


class StepOutputs(records.Message):
    """Outputs of one engine step (worker → daemon → frontend).

    ``frames`` is empty if a device without an engine made the tokens, which ``progress`` contains.
    ``step_s`` is the time of a pure decode step, divided by the mean number of tokens that an
    answer gained, and None if the step prefilled. ``drafts`` is None without speculative decoding,
    and counts the drafts of all steps since the last report. ``frame_counts`` has
    the number of frames per frontend number, in the order of the frames; empty means one frontend
    for all frames. Each frontend gets the frames and the progress of its requests.
    """

    model: str
    at_s: float
    frames: list[bytes]
    progress: list[records.RequestProgress]
    step_s: float | None = None
    frame_counts: dict[int, int] = {}
    drafts: records.DraftCounts | None = None


class Migrated(records.Message):
    """A request has left the worker; all its tokens were sent before.

    ``is_known`` is false if the worker did not have the request. ``kv_transfer`` is None if the KV
    is not transferred.
    """

    model: str
    request_id: str
    is_known: bool = True
    kv_transfer: records.KvTransfer | None = None


class RequestAttached(records.Message):
    """A migrated request can continue on this worker."""

    model: str
    request_id: str


class KvTransferUsed(records.Message):
    """The target no longer needs a KV transfer."""

    transfer_id: str
    source: int


class MemoryReport(records.Message):
    """Changes, since the last report, of the bytes that models lack on the device to run."""

    missing_bytes: dict[str, int]


class TurnReport(records.Message):
    """A turn is over: the quota is used while another model waits, or no work is left.

    ``model`` had the turn, ``began_s`` is the time when the model could run, None if never, and
    ``ended_s`` the end. ``missing_bytes`` as in ``MemoryReport``.
    """

    turn_id: int
    model: str
    began_s: float | None
    ended_s: float
    missing_bytes: dict[str, int]


class Switched(records.Message):
    """A switch happened.

    ``bandwidth_bytes_per_s`` is a moving average of the worker's switches including mapping, 0 if
    not measured.
    """

    switch: records.SwitchRecord
    bandwidth_bytes_per_s: float = 0.0


class WrongAnswer(records.Message):
    """A model answered its self-check with other tokens than before, so its bytes are wrong.

    The model's requests on the worker have ended.
    """

    model: str
    expected: tuple[int, ...]
    answered: tuple[int, ...]


class WorkerStatus(records.Message):
    """The worker's status several times a second, which shows that the worker is alive.

    ``turn_began_s`` is the time when the present model could run, None while the model is loaded.
    ``loading`` is the present load of a model, if there is one. ``kv_host_slab_bytes`` is host
    memory in slabs for blocks of some size, in use or not. ``unpinned_bytes`` is host memory that
    the driver has not pinned, or not yet, and ``pinning_problem`` the driver's refusal.
    ``unbound_bytes`` are the weights, by model, that stay on the device without an engine, in
    memory that is free.
    """

    at_s: float
    activity: DeviceActivity
    quota_s: float
    models: list[records.ModelMemory]
    turn_began_s: float | None = None
    loading: records.LoadProgress | None = None
    kv_host_slab_bytes: int = 0
    unpinned_bytes: int = 0
    pinning_problem: str = ""
    unbound_bytes: dict[str, int] = {}
