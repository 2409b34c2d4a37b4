"""Events and actions of the scheduling core. Plain data: all events replayed restore the state.

Instants are seconds of any one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import Priority, Role, Targets
from gpupoold.latency.models import DecodeBatch, LatencyModel

_PROBE_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Constants of step times.

    A prefill of ``t`` tokens takes ``base + t * token + t^2 * token2`` seconds, a decode step of
    ``n`` sequences with ``c`` tokens of context in total ``base + n * sequence + c * context``. The
    defaults are a guess for an unmeasured model; the core corrects steps by observation.
    """

    prefill_base_s: float = 0.02
    prefill_token_s: float = 1e-4
    prefill_token2_s: float = 0.0
    decode_base_s: float = 0.02
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0

    def prefill_s(self, prompt_tokens: int) -> float:
        """Return the seconds to prefill one prompt."""
        return self.prefills_s(1, prompt_tokens, prompt_tokens * prompt_tokens)

    def prefills_s(self, num_prompts: int, num_tokens: int, num_tokens2: int) -> float:
        """Return the seconds to prefill prompts; ``num_tokens2`` is the sum of squares."""
        return (
            num_prompts * self.prefill_base_s
            + num_tokens * self.prefill_token_s
            + num_tokens2 * self.prefill_token2_s
        )

    def chunk_s(self, done_tokens: int, num_tokens: int) -> float:
        """Return the seconds that ``num_tokens`` more prompt tokens add to a step.

        See :meth:`mixed_step_s` of :class:`.LatencyModel`.
        """
        tokens2 = num_tokens * (num_tokens + 2 * done_tokens)
        return num_tokens * self.prefill_token_s + tokens2 * self.prefill_token2_s

    def step_s(self, batch_size: int, context_tokens: int) -> float:
        """Return the seconds of a decode step of ``batch_size`` sequences with
        ``context_tokens`` in total.
        """
        return (
            self.decode_base_s
            + batch_size * self.decode_sequence_s
            + context_tokens * self.decode_context_s
        )


# A guess for an unmeasured pooling model, which has no decode steps.
POOLING_COSTS = ModelCosts(decode_base_s=0.0)


def costs_of(latency: LatencyModel) -> ModelCosts:
    """Return the constants of a latency model whose forms are those of ``ModelCosts``."""
    prefill = latency.prefill.predict_s
    base_s, once_s, twice_s = (
        prefill([tokens]) for tokens in (0, _PROBE_TOKENS, 2 * _PROBE_TOKENS)
    )
    square_s = (twice_s - 2 * once_s + base_s) / (2 * _PROBE_TOKENS**2)
    decode = latency.decode.predict_s
    one_s = decode(DecodeBatch(1, 0))
    sequence_s = decode(DecodeBatch(2, 0)) - one_s
    context_s = (decode(DecodeBatch(1, _PROBE_TOKENS)) - one_s) / _PROBE_TOKENS
    return ModelCosts(
        prefill_base_s=base_s,
        prefill_token_s=(once_s - base_s) / _PROBE_TOKENS - square_s * _PROBE_TOKENS,
        prefill_token2_s=square_s,
        decode_base_s=one_s - sequence_s,
        decode_sequence_s=sequence_s,
        decode_context_s=context_s,
    )


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model can have requests; a repeated event replaces the description.

    Requests of a model without a device are held. A model that does not generate makes one result
    per prompt, which counts as a first token.
    """

    model: str
    targets: Targets
    weight_bytes: int
    kv_bytes_per_token: int
    costs: ModelCosts
    generates: bool = True


@dataclass(frozen=True, slots=True)
class TargetsChanged:
    """A model's targets have changed, for live requests too."""

    model: str
    targets: Targets


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model has been removed with all its requests."""

    model: str


@dataclass(frozen=True, slots=True)
class DeviceUp:
    """A device can serve: bytes for weights and KV, and the bandwidth of copies to the device.

    ``prefetches``: the device brings in the next model during a turn. ``kv_host_bytes``: host
    memory for offloaded KV, None for no limit, so that no request ever waits for KV memory. Devices
    of one ``kind`` are equally fast and share measured step times. ``far_share`` of the bandwidth
    is left to copies from memory of another NUMA node.
    """

    device: int
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    prefetches: bool = True
    kv_host_bytes: int | None = None
    role: Role = Role.MIXED
    is_role_fixed: bool = False
    kind: str = ""
    far_share: float = 1.0


@dataclass(frozen=True, slots=True)
class DeviceDown:
    """A device has stopped serving; its requests restart on other devices, after their tokens."""

    device: int


@dataclass(frozen=True, slots=True)
class RoleSet:
    """A device's role; if fixed, the policy may not change the role."""

    device: int
    role: Role
    is_fixed: bool = True


@dataclass(frozen=True, slots=True)
class DrainSet:
    """A device drains: gets no new requests and migrates its requests where possible; or the
    drain ends.
    """

    device: int
    is_draining: bool


@dataclass(frozen=True, slots=True)
class BandwidthMeasured:
    """Copies to a device have another bandwidth than stated before."""

    device: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class FarSnapshots:
    """The models whose weights a device copies from memory of another NUMA node."""

    device: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuotaMaxSet:
    """The longest turn has changed, from the next planned turn on."""

    quota_max_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, about a second; for periodic decisions of a policy."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A device can run a model: the engine exists, and the snapshot is in host memory.

    ``costs`` hold for devices of the same kind; None means the costs of ``ModelAdded``.
    """

    device: int
    model: str
    costs: ModelCosts | None = None


@dataclass(frozen=True, slots=True)
class Unhosted:
    """A device can no longer run a model; the model's requests wait for another device."""

    device: int
    model: str


@dataclass(frozen=True, slots=True)
class Hostable:
    """The devices that do not run a model yet: they load the engine now, or could load the engine.

    Replaces the devices of the model's earlier event.
    """

    model: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request has arrived.

    Only a simulator knows ``output_tokens``, for policies with an oracle. ``num_tokens`` of the
    answer exist from a lost device: these tokens are prefilled with the prompt, but belong to the
    answer. The answer has at most ``max_tokens``, None for no limit. A ``ttft_s`` of None means the
    model's target.
    """

    request_id: str
    model: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int | None = None
    priority: Priority = Priority.NORMAL
    num_tokens: int = 0
    max_tokens: int | None = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step on a device: ``num_tokens`` more for each of ``request_ids``.

    ``step_s`` is the time of a decode step of these requests, None for a step that prefilled. With
    no tokens the event carries only the time.
    """

    device: int
    model: str
    request_ids: tuple[str, ...]
    num_tokens: int = 1
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptCached:
    """A device did not compute ``num_tokens`` of a prompt, because their KV existed; maybe 0."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Attached:
    """A migrated request can continue: the KV is in host memory for the new device.

    ``num_tokens`` of its answer exist now, None if unchanged.
    """

    request_id: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has ended.

    ``is_complete``: the answer ended by itself or at the request's limit. The length of a
    cancelled, failed or lost answer is no sample of answer lengths.
    """

    request_id: str
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """The bytes that a device must move now to run each of these models."""

    device: int
    missing_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A device has ended a turn: the quota is used while other models wait, or no work is left."""

    device: int
    turn_id: int


Event = (
    ModelAdded
    | TargetsChanged
    | ModelRemoved
    | DeviceUp
    | DeviceDown
    | RoleSet
    | DrainSet
    | BandwidthMeasured
    | FarSnapshots
    | QuotaMaxSet
    | Tick
    | Hosted
    | Unhosted
    | Hostable
    | Arrived
    | Stepped
    | PromptCached
    | Attached
    | Ended
    | MemoryChanged
    | TurnEnded
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: ``model`` runs for ``quota_s`` once resident, or longer if no other model waits.

    A step takes at most ``chunk_tokens``, prompt tokens plus one per answer, so that a prompt does
    not delay answers beyond their target; None means the engine's limit.
    """

    turn_id: int
    model: str
    quota_s: float
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to a device for prefill and decoding."""

    request_id: str
    device: int


@dataclass(frozen=True, slots=True)
class Migrate:
    """Migrate a request with a token, and its KV, to another device."""

    request_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StartTurn:
    """The present turn of a device, and the next model, to be prefetched meanwhile.

    A turn with the id of the present turn may change its quota, counted from the turn's start. With
    ``then`` None the turn continues past its quota. A device whose turn ends prepares for ``then``
    at once, without waiting for orders.
    """

    device: int
    turn: Turn | None
    then: str | None


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Change a device's role; the core's state has the new role already."""

    device: int
    role: Role


Action = Send | Migrate | StartTurn | ChangeRole
