"""Names of the rules that place requests and give turns."""

from __future__ import annotations

from enum import StrEnum


class Rule(StrEnum):
    """The rule behind a decision. ``why`` is a sentence for people."""

    why: str

    def __new__(cls, value: str, why: str) -> Rule:
        """Create a rule with its sentence."""
        made = str.__new__(cls, value)
        made._value_ = value
        made.why = why
        return made

    # Which device a request is for.
    ONLY_DEVICE = "only-device", "no other device could take the request"
    SERVED_THERE = (
        "served-there",
        "the model is being served there, and the request joins the batch",
    )
    NO_COPY = "no-copy", "the model is being served there, and a second device would not pay"
    LEAST_LOADED = "least-loaded", "the device has the least to do"
    HOME = "home", "among the devices with the least to do, the last to serve the model"
    RESIDENT = "resident", "among the devices with the least to do, one with the model's weights"
    KV_ROOM = "kv-room", "the devices that come first have no memory for the request's KV"
    WAITS_FOR_KV = (
        "waits-for-kv",
        "no device has memory for the request's KV; the fewest requests wait there",
    )
    MIGRATED_OFF_FULL = "moved-off-full", "the first device was full, and the new device was not"
    MIGRATED_FOR_KV = (
        "moved-for-kv",
        "the new device had memory for the KV, and the first device had none",
    )
    PREFILLS = "prefills", "the prefill device with the earliest first token"
    CONVERTED = (
        "converted",
        "no prefill device is in time; a decode device prefills beside its answers",
    )
    FREE_DEVICE = "free-device", "the request was next in the queue, and the device was free"
    FEWEST_REQUESTS = "fewest-requests", "the device has the fewest requests"
    FIXED_PLACE = "fixed-place", "the policy has given the model this place"
    GROUPED = "grouped", "the first group of the model with free places is there"
    SHORTEST_QUEUE = "shortest-queue", "the device has the shortest queue of prompts"
    ANSWERS_ELSEWHERE = (
        "answers-elsewhere",
        "the device of the prompt leaves answers to other devices",
    )
    REBALANCED = "rebalanced", "the first device was full, and the new device had time to spare"

    # Whose turn it is on a device.
    DEADLINE = "deadline", "turns go in the order of their deadlines"
    PUT_OFF = (
        "put-off",
        "not all can be in time; this model gives the fewest timely tokens per second",
    )
    EXPIRED = "expired", "all requests of the model are late; models that can be in time go first"
    AHEAD = "ahead", "none of its requests is near its deadline"
    STARVING = "starving", "the model has waited too long and goes first, late or not"
    NOT_YET_BEGUN = (
        "not-yet-begun",
        "the device is full and begins another model only when necessary",
    )
    ROUND = "round", "models take turns in rounds, with quotas by their targets"
    PREFILL_FIRST = "prefill-first", "prompts go before answers"
    UNTIL_DONE = "until-done", "a device keeps a model until the model's requests are done"
