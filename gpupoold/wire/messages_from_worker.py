"""Messages from a worker to the daemon."""

from __future__ import annotations

from gpupoold.latency.stored import Profile
from gpupoold.wire.base import Message
from gpupoold.wire.records import (
    KvTransfer,
    LoadedModel,
    ModelMemory,
    RequestProgress,
    SwitchRecord,
)


class WorkerReady(Message):
    """The worker owns its device and can load models. With ``shares_kv_host`` the memfd of its
    KV host cache comes along.

    ``bandwidth_bytes_per_s`` is that of a switch, with mapping; the link's own are for copies
    to and from the device. ``kv_host_bytes`` is the size of its KV host cache; None: as much
    as it takes.
    """

    device: int
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
    """A model is ready to serve; with ``has_image`` its snapshot's memfd comes along.

    ``profile`` is what timing its steps gave, None when that was not asked for; ``self-check``
    what it answered to a fixed prompt, empty when it generates no text. ``image_problem``
    says why the snapshot that came with the order was not used.
    """

    model: LoadedModel
    layout_digest: str
    has_snapshot: bool = False
    profile: Profile | None = None
    self_check: tuple[int, ...] = ()
    snapshot_problem: str = ""


class ModelFailed(Message):
    """Loading failed; the error is for the user."""

    name: str
    error_code: str
    message: str
    hint: str = ""


class ModelUnloaded(Message):
    """The model's pages, regions and engine are gone."""

    name: str


class SnapshotDropped(Message):
    """The worker has no view of the model's snapshot any more."""

    model: str


class SnapshotTaken(Message):
    """The model can run again; or ``problem`` says why it cannot."""

    model: str
    problem: str = ""


class StepOutputs(Message):
    """What one engine step produced (worker → daemon → frontend).

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


class Migrated(Message):
    """A request that was to go has gone; all its tokens so far were told before.

    ``is_known`` is false if it was not there. ``KV transfer`` None: its KV did not come along.
    """

    model: str
    request_id: str
    is_known: bool = True
    kv_transfer: KvTransfer | None = None


class RequestAttached(Message):
    """A request that was moving can go on here."""

    model: str
    request_id: str


class KvTransferUsed(Message):
    """A KV transfer is not needed any more by whom it was for."""

    transfer_id: str
    source: int


class MemoryReport(Message):
    """What a device would have to move to run a model has changed, between ends of turns.

    ``missing_bytes`` has the bytes for every model for which they are not as they were last
    told.
    """

    missing_bytes: dict[str, int]


class TurnReport(Message):
    """A turn is over: its quota used while another model waits, or nothing left to do.

    ``missing_bytes``: as in ``MemoryReport``.

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

    ``bandwidth_bytes_per_s`` is what switches of the worker reach by now, mapping included, a
    moving average; 0: the worker does not measure it.
    """

    switch: SwitchRecord
    bandwidth_bytes_per_s: float = 0.0


class WrongAnswer(Message):
    """A model that has served gives another answer to the self-check's prompt than it did: its
    bytes are wrong. Its requests here have ended."""

    model: str
    expected: tuple[int, ...]
    answered: tuple[int, ...]


class WorkerStatus(Message):
    """Sent a few times a second: proof of life and what ``gpupool ps`` shows.

    ``turn_began_s`` is when the model on its turn could run, None while it is being brought in.
    ``prefetched_bytes`` of weights were brought in for a turn that is still to come.
    """

    device: int
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
