"""Metrics with the label ``model``, one set per registered model from its first scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpupoold.control.requests.admission import REFUSAL_REASONS
from gpupoold.domain import FinishReason, ModelState
from gpupoold.metrics.families import Family, counter, durations, gauge, renamed
from gpupoold.metrics.scrape import Scrape, memories

_MODEL = ("model",)


def model_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    yield from _requests(scrape)
    yield from _tokens(scrape)
    yield from _now(scrape)
    yield from _memory(scrape)


def _requests(scrape: Scrape) -> Iterator[Family]:
    yield counter(
        "requests",
        "Requests that were taken.",
        _MODEL,
        (((name,), one.requests) for name, one in scrape.counts.items()),
    )
    yield counter(
        "requests_finished",
        "Requests that were taken and have ended, by why.",
        ("model", "reason"),
        (
            ((name, reason.value), one.finished[reason])
            for name, one in scrape.models()
            for reason in FinishReason
        ),
    )
    yield counter(
        "requests_refused",
        "Requests that the daemon did not take, by why.",
        ("model", "reason"),
        (
            ((name, reason), one.refused[reason])
            for name, one in scrape.models()
            for reason in REFUSAL_REASONS
        ),
    )
    yield counter(
        "requests_dropped",
        "Requests that were taken and ended before they began, too late for their first token.",
        _MODEL,
        (((name,), one.dropped) for name, one in scrape.counts.items()),
    )
    yield counter(
        "requests_resumed",
        "Times a request lost its worker and went on elsewhere, or there when it was back.",
        _MODEL,
        (((name,), one.resumed) for name, one in scrape.models()),
    )


def _tokens(scrape: Scrape) -> Iterator[Family]:
    yield counter(
        "prompt_tokens",
        "Tokens of the prompts of requests that were taken.",
        _MODEL,
        (((name,), one.prompt_tokens) for name, one in scrape.models()),
    )
    yield counter(
        "output_tokens_in_time",
        "Tokens that went out by their deadlines, which are fixed when a request arrives.",
        _MODEL,
        (((name,), one.tokens_in_time) for name, one in scrape.counts.items()),
    )
    yield counter(
        "output_tokens",
        "Tokens that went out.",
        _MODEL,
        (((name,), one.tokens) for name, one in scrape.counts.items()),
    )
    yield gauge(
        "attainment_ratio",
        "Share of the last minute's tokens that were in time; absent without any.",
        _MODEL,
        (((name,), one) for name, one in scrape.attainments.items()),
    )
    yield durations(
        "time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        _MODEL,
        (((name,), one.ttft) for name, one in scrape.counts.items()),
    )
    yield durations(
        "time_between_tokens_seconds",
        "From one token of a request to its next.",
        _MODEL,
        (((name,), one.tbt) for name, one in scrape.counts.items()),
    )


def _now(scrape: Scrape) -> Iterator[Family]:
    lifecycle, dispatcher = scrape.pool.lifecycle, scrape.pool.dispatcher
    states = {name: lifecycle.state_of(row) for name, row in scrape.rows.items()}
    waiting = Counter({name: dispatcher.live.num_waiting(name) for name in scrape.rows})
    for worker in scrape.workers:
        for held in memories(worker):
            waiting[held.model] += held.num_waiting
    yield gauge(
        "model_state",
        "1 for the state that the model is in, 0 for the others.",
        ("model", "state"),
        (((name, one.value), states[name] is one) for name in scrape.rows for one in ModelState),
    )
    yield gauge(
        "target_time_to_first_token_seconds",
        "What the model's users were promised.",
        _MODEL,
        (((name,), row.spec.targets.ttft_s) for name, row in scrape.rows.items()),
    )
    yield gauge(
        "target_time_between_tokens_seconds",
        "What the model's users were promised.",
        _MODEL,
        (((name,), row.spec.targets.tbt_s) for name, row in scrape.rows.items()),
    )
    yield gauge(
        "live_requests",
        "Requests that were taken and have not ended.",
        _MODEL,
        (((name,), dispatcher.live.num_of(name)) for name in scrape.rows),
    )
    yield gauge(
        "waiting_requests",
        "Those of the live requests that no step has begun.",
        _MODEL,
        (((name,), waiting[name]) for name in scrape.rows),
    )


def _memory(scrape: Scrape) -> Iterator[Family]:
    held: Counter[tuple[str, str]] = Counter()
    for worker in scrape.workers:
        for one in memories(worker):
            held[one.model, "weights"] += one.weights_resident_bytes
            held[one.model, "kv"] += one.kv_resident_bytes
            held[one.model, "kv_host"] += one.kv_host_bytes
    for name, snapshot in scrape.pool.cache.snapshots.items():
        held[name, "snapshot_host"] += snapshot.num_bytes
    yield gauge(
        "model_memory_bytes",
        "What the model has: weights and kv on devices, kv_host of paused requests and its "
        "snapshot_host in host memory.",
        ("model", "kind"),
        (
            ((name, kind), held[name, kind])
            for name in scrape.rows
            for kind in ("weights", "kv", "kv_host", "snapshot_host")
        ),
    )
    yield counter(
        "model_cache_hits",
        "Requests whose model's snapshot was in host memory when they came, or was not needed.",
        _MODEL,
        (((name,), one.cache_hits) for name, one in scrape.models()),
    )
    yield counter(
        "model_cache_misses",
        "Requests that waited until their model's snapshot was in host memory.",
        _MODEL,
        (((name,), one.cache_misses) for name, one in scrape.models()),
    )
    yield counter(
        "model_quarantines",
        "Times the model was put into quarantine, having ended its workers again and again.",
        _MODEL,
        (((name,), one.quarantines) for name, one in scrape.models()),
    )
    failures = counter(
        "model_self_check_failures",
        "Times the model answered the self-check's prompt wrongly and was loaded anew.",
        _MODEL,
        (((name,), one.self_check_failures) for name, one in scrape.models()),
    )
    yield from renamed(failures, "model_canary_failures")
