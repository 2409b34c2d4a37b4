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
    ONLY_DEVICE = "only-device", "no other device could take it"
    SERVED_THERE = "served-there", "its model is being served there, so it joins that batch"
    NO_COPY = "no-copy", "its model is being served there, and a second device would not pay"
    LEAST_LOADED = "least-loaded", "that device has the least to do"
    HOME = "home", "of the devices with the least to do, its model was on that one last"
    RESIDENT = "resident", "of the devices with the least to do, that one has its weights"
    KV_ROOM = "kv-room", "the devices before it in order have no room for its KV"
    WAITS_FOR_KV = "waits-for-kv", "no device has room for its KV; there the fewest wait for it"
    MIGRATED_OFF_FULL = "moved-off-full", "its first device was full, and that one was not"
    MIGRATED_FOR_KV = "moved-for-kv", "that device had room for its KV, and its first had none"
    PREFILLS = "prefills", "that device prefills, and has the first token soonest"
    CONVERTED = "converted", "no prefill device is in time; that one prefills beside its answers"
    FREE_DEVICE = "free-device", "it was the next in the queue, and that device was free"
    FEWEST_REQUESTS = "fewest-requests", "that device has the fewest requests"
    FIXED_PLACE = "fixed-place", "the policy has given its model that place"
    GROUPED = "grouped", "the first group of its model that had room is there"
    SHORTEST_QUEUE = "shortest-queue", "that device has the shortest queue of prompts"
    ANSWERS_ELSEWHERE = "answers-elsewhere", "its prompt's device leaves answers to others"
    REBALANCED = "rebalanced", "its device was full, and that one had time to spare"

    # Whose turn it is on a device.
    DEADLINE = "deadline", "turns go in the order of their deadlines"
    PUT_OFF = "put-off", "not all can be in time, and it gives the fewest tokens in time per second"
    EXPIRED = "expired", "all its requests are late, so those that can be in time go first"
    AHEAD = "ahead", "none of its requests is near its deadline"
    STARVING = "starving", "it has waited so long that it goes first, late or not"
    NOT_YET_BEGUN = (
        "not-yet-begun",
        "the device is full and begins with another model only when it must",
    )
    ROUND = "round", "models take turns in rounds, with quotas by their targets"
    PREFILL_FIRST = "prefill-first", "prompts go before answers"
    UNTIL_DONE = "until-done", "a device keeps a model until its requests are done"
