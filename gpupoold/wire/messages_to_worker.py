"""Messages from the daemon to a worker."""

from __future__ import annotations

from gpupoold.domain import Priority
from gpupoold.wire.base import Message
from gpupoold.wire.records import (
    KvTransfer,
    ModelToLoad,
)


class LoadModel(Message):
    """Load a model; with ``has_image`` one descriptor (the snapshot's memfd) comes along.

    ``self-check`` is what the model with that snapshot answers to a fixed prompt, empty if that is
    not known. ``profiling_budget_s`` is how long its steps may be timed afterwards; 0: they
    are known.
    """

    model: ModelToLoad
    has_snapshot: bool = False
    layout_digest: str = ""
    profiling_budget_s: float = 0.0
    self_check: tuple[int, ...] = ()


class UnloadModel(Message):
    """Drop a model; its live requests must have ended before."""

    name: str


class DropSnapshot(Message):
    """Let the snapshot of a model without requests go; its engine stays. Answered by
    ``SnapshotDropped``."""

    model: str


class TakeSnapshot(Message):
    """Have the snapshot of a model again: the memfd that comes along, of the layout that the
    model's engine has. Answered by ``SnapshotTaken``."""

    model: str


class SetTargets(Message):
    """New targets for a model, from the next turn on."""

    name: str
    ttft_s: float
    tbt_s: float


class AddRequest(Message):
    """A request for a model (frontend → daemon → worker); ``frames`` have it as vLLM encodes it.

    ``output_token_ids`` are the tokens that its client has from another worker. One that
    ``is_moving`` is answered by ``Attached`` when it can go on; its KV is in ``KV transfer``, or
    has to be computed anew. ``key_id``: of the API key that it came with, empty without one.
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
    kv_transfer: KvTransfer | None = None
    key_id: str = ""
    priority: Priority = Priority.NORMAL
    frontend: int = 0
    is_isolated: bool = False


class EndIsolation(Message):
    """A request may share steps with others again (daemon → worker)."""

    model: str
    request_id: str


class AbortRequests(Message):
    """The client went away or the daemon gave up (frontend → daemon → worker)."""

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


class MigrateOut(Message):
    """Let a request go, with its KV; answered by ``Migrated``."""

    model: str
    request_id: str


class PeerHost(Message):
    """The host cache of another worker, whose memfd comes along, for KV transfers from there. It
    takes the place of one that the other had when it ran before."""

    device: int
    num_bytes: int


class PeerDown(Message):
    """A worker has died: what had not arrived from there never will."""

    device: int


class ReleaseKvTransfer(Message):
    """Nobody needs the bytes of a KV transfer any more."""

    transfer_id: str


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
