"""Messages from a worker to the daemon."""

from __future__ import annotations

from gpupoold.domain import DeviceActivity, DeviceFacts
from gpupoold.latency.stored import Profile
from gpupoold.wire.base import Message
from gpupoold.wire.records import (
    DraftCounts,
    EngineMemory,
    KvTransfer,
    LoadedModel,
    LoadProgress,
    ModelMemory,
    RequestProgress,
    SwitchRecord,
)


class WorkerReady(Message):
    """The worker owns its device and can load models.

    With ``shares_kv_host`` the message carries the memfd of the KV host cache.
    ``reserve_free_bytes`` is the device's free memory outside the pages, None if unknown.
    """

    facts: DeviceFacts
    engine_version: str
    device_name: str = ""
    shares_kv_host: bool = False
    reserve_free_bytes: int | None = None


class ModelLoaded(Message):
    """A model is ready to serve; with ``has_snapshot`` the message carries the snapshot's memfd.

    ``profile`` has the measured step times, None if not requested. ``self_check`` has the tokens of
    the self-check, empty if the model generates no text. ``snapshot_problem`` is the reason why the
    snapshot in the order was not used. ``dropped`` are the requests of a replaced engine, which the
    daemon sends again. ``memory`` is the engine's memory outside the pages.
    """

    model: LoadedModel
    layout_digest: str
    has_snapshot: bool = False
    profile: Profile | None = None
    self_check: tuple[int, ...] = ()
    snapshot_problem: str = ""
    dropped: list[str] = []
    memory: EngineMemory = EngineMemory()


class ModelFailed(Message):
    """Loading failed; the error is for the user."""

    name: str
    error_code: str
    message: str
    hint: str = ""


class ModelUnloaded(Message):
    """The model's pages, address ranges and engine are freed.

    ``freed`` is the memory of the engine outside the pages that the process has given back.
    """

    name: str
    freed: EngineMemory = EngineMemory()


class SnapshotDropped(Message):
    """The worker has unmapped the model's snapshot."""

    model: str


class SnapshotTaken(Message):
    """The model can run again, or cannot for the reason in ``problem``."""

    model: str
    problem: str = ""


class StepOutputs(Message):
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
    progress: list[RequestProgress]
    step_s: float | None = None
    frame_counts: dict[int, int] = {}
    drafts: DraftCounts | None = None


class Migrated(Message):
    """A request has left the worker; all its tokens were sent before.

    ``is_known`` is false if the worker did not have the request. ``kv_transfer`` is None if the KV
    is not transferred.
    """

    model: str
    request_id: str
    is_known: bool = True
    kv_transfer: KvTransfer | None = None


class RequestAttached(Message):
    """A migrated request can continue on this worker."""

    model: str
    request_id: str


class KvTransferUsed(Message):
    """The target no longer needs a KV transfer."""

    transfer_id: str
    source: int


class MemoryReport(Message):
    """Changes, since the last report, of the bytes that models lack on the device to run."""

    missing_bytes: dict[str, int]


class TurnReport(Message):
    """A turn is over: the quota is used while another model waits, or no work is left.

    ``model`` had the turn, ``began_s`` is the time when the model could run, None if never, and
    ``ended_s`` the end. ``missing_bytes`` as in ``MemoryReport``.
    """

    turn_id: int
    model: str
    began_s: float | None
    ended_s: float
    missing_bytes: dict[str, int]


class Switched(Message):
    """A switch happened.

    ``bandwidth_bytes_per_s`` is a moving average of the worker's switches including mapping, 0 if
    not measured.
    """

    switch: SwitchRecord
    bandwidth_bytes_per_s: float = 0.0


class WrongAnswer(Message):
    """A model answered its self-check with other tokens than before, so its bytes are wrong.

    The model's requests on the worker have ended.
    """

    model: str
    expected: tuple[int, ...]
    answered: tuple[int, ...]


class WorkerStatus(Message):
    """The worker's status several times a second, which shows that the worker is alive.

    ``turn_began_s`` is the time when the present model could run, None while the model is loaded.
    ``loading`` is the present load of a model, if there is one. ``kv_host_slab_bytes`` is host
    memory in slabs for blocks of some size, in use or not.
    """

    at_s: float
    activity: DeviceActivity
    quota_s: float
    models: list[ModelMemory]
    turn_began_s: float | None = None
    loading: LoadProgress | None = None
    kv_host_slab_bytes: int = 0
