"""Names of the rules that place requests and give turns."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class ReasonName(StrEnum):
    """Names of reasons. ``why`` is a sentence for people."""

    why: str

    def __new__(cls, value: str, why: str) -> Self:
        made = str.__new__(cls, value)
        made._value_ = value
        made.why = why
        return made


class Rule(ReasonName):
    """The rule behind a decision."""

    # Rules that place requests on devices.
    ONLY_DEVICE = "only-device", "no other device can take the request"
    SERVED_THERE = (
        "served-there",
        "the device serves the model already, so the request joins the batch",
    )
    FREE_OF_OTHERS = (
        "free-of-others",
        "no other model has requests on this device, and the model's first device has some load",
    )
    NO_COPY = "no-copy", "the device serves the model already, and a second device would not pay"
    LEAST_LOADED = "least-loaded", "the device has the least load"
    HOME = "home", "of the least loaded devices, this device had the model last"
    PLANNED_HOME = (
        "planned-home",
        "the models' rates and targets go best together if this device serves the model",
    )
    RESIDENT = "resident", "of the least loaded devices, this device has the model's weights"
    NEAR_WEIGHTS = (
        "near-weights",
        "of the least loaded devices, this device is on the NUMA node of the weights' snapshot",
    )
    KV_ROOM = "kv-room", "the preferred devices have no room for the request's KV"
    WAITS_FOR_KV = (
        "waits-for-kv",
        "no device has room for the request's KV; on this device the fewest wait",
    )
    MIGRATED_OFF_FULL = "moved-off-full", "the first device was full, and this device was not"
    MIGRATED_FOR_KV = (
        "moved-for-kv",
        "this device had room for the request's KV, and the first device had none",
    )
    PREFILLS = "prefills", "the device prefills, and has the first token soonest"
    CONVERTED = "converted", "no prefill device is on time; this device prefills beside answers"
    FREE_DEVICE = "free-device", "the request was next in the queue, and the device was free"
    FEWEST_REQUESTS = "fewest-requests", "the device has the fewest requests"
    TWO_CHOICES = "two-choices", "of two devices drawn at random, this device has fewer requests"
    BEST_FIT = "best-fit", "the device is the fullest that can take the request"
    FIXED_PLACE = "fixed-place", "the policy has fixed the model to the device"
    GROUPED = "grouped", "the device has the first group of the model with room"
    SHORTEST_QUEUE = "shortest-queue", "the device has the shortest queue of prompts"
    ANSWERS_ELSEWHERE = "answers-elsewhere", "the prompt's device leaves answers to other devices"
    BATCHED = "batched", "a request of a batch: the device has the most time to spare"
    REBALANCED = "rebalanced", "the previous device was full, and this device had time to spare"

    # Rules that order turns on a device.
    DEADLINE = "deadline", "turns are in the order of their deadlines"
    PUT_OFF = (
        "put-off",
        "not all turns can be on time, and this turn has the fewest on-time tokens/s",
    )
    EXPIRED = (
        "expired",
        "all requests of the model are late, so models that can be on time go first",
    )
    AHEAD = "ahead", "no request of the model is near its deadline"
    GATHERS_LEAD = (
        "gathers-lead",
        "the next turn with both switches takes longer than the lead, and that turn can wait",
    )
    INTERLEAVED = (
        "interleaved",
        "nothing has to move and there is time for all, so models take turns of a few steps",
    )
    BACKGROUND = "background", "only requests of batches: they run in time that others leave"
    STARVING = "starving", "the model has waited so long that it goes first, late or not"
    NOT_YET_BEGUN = (
        "not-yet-begun",
        "the device is full and begins another model only at the last moment",
    )
    ROUND = "round", "models take turns in rounds, with quotas by their targets"
    PREFILL_FIRST = "prefill-first", "prompts go before answers"
    UNTIL_DONE = "until-done", "a device keeps a model until its requests have ended"
