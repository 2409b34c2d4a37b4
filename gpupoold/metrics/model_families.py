"""Metrics with the label ``model``, one set per registered model from its first scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpupoold.control.requests.admission import REFUSAL_REASONS
from gpupoold.domain import FinishReason, ModelState
from gpupoold.metrics.families import Family, counter, gauge, histogram, one_each, renamed
from gpupoold.metrics.scrape import Scrape, memories

_MODEL = ("model",)


def model_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    yield from _requests(scrape)
    yield from _tokens(scrape)
    yield from _now(scrape)
    yield from _memory(scrape)


def _requests(scrape: Scrape) -> Iterator[Family]:
    of_counts = one_each(counter, "model", scrape.counts.items())
    of_meters = one_each(counter, "model", scrape.models())
    yield of_counts("requests", "Requests that were taken.", lambda one: one.requests)
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
    yield of_counts(
        "requests_dropped",
        "Requests that were taken and ended before they began, too late for their first token.",
        lambda one: one.dropped,
    )
    yield of_meters(
        "requests_resumed",
        "Times a request lost its worker and went on elsewhere, or there when it was back.",
        lambda one: one.resumed,
    )


def _tokens(scrape: Scrape) -> Iterator[Family]:
    of_counts = one_each(counter, "model", scrape.counts.items())
    of_meters = one_each(counter, "model", scrape.models())
    yield of_meters(
        "prompt_tokens",
        "Tokens of the prompts of requests that were taken.",
        lambda one: one.prompt_tokens,
    )
    yield of_counts(
        "output_tokens_in_time",
        "Tokens that went out by their deadlines, which are fixed when a request arrives.",
        lambda one: one.tokens_in_time,
    )
    yield of_counts(
        "output_tokens",
        "Tokens that went out.",
        lambda one: one.tokens,
    )
    yield gauge(
        "attainment_ratio",
        "Share of the last minute's tokens that were in time; absent without any.",
        _MODEL,
        (((name,), one) for name, one in scrape.attainments.items()),
    )
    yield histogram(
        "time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        _MODEL,
        (((name,), one.ttft) for name, one in scrape.counts.items()),
    )
    yield histogram(
        "time_between_tokens_seconds",
        "From one token of a request to its next.",
        _MODEL,
        (((name,), one.tbt) for name, one in scrape.counts.items()),
    )


def _now(scrape: Scrape) -> Iterator[Family]:
    lifecycle, dispatcher = scrape.pool.lifecycle, scrape.pool.dispatcher
    states = {name: lifecycle.state_of(row) for name, row in scrape.rows.items()}
    waiting = Counter({name: dispatcher.num_waiting(name) for name in scrape.rows})
    for worker in scrape.workers:
        for held in memories(worker):
            waiting[held.model] += held.num_waiting
    yield gauge(
        "model_state",
        "1 for the state that the model is in, 0 for the others.",
        ("model", "state"),
        (((name, one.value), states[name] is one) for name in scrape.rows for one in ModelState),
    )
    of_rows = one_each(gauge, "model", scrape.rows.items())
    yield of_rows(
        "target_time_to_first_token_seconds",
        "What the model's users were promised.",
        lambda row: row.spec.targets.ttft_s,
    )
    yield of_rows(
        "target_time_between_tokens_seconds",
        "What the model's users were promised.",
        lambda row: row.spec.targets.tbt_s,
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
    of_meters = one_each(counter, "model", scrape.models())
    yield of_meters(
        "model_cache_hits",
        "Requests whose model's snapshot was in host memory when they came, or was not needed.",
        lambda one: one.cache_hits,
    )
    yield of_meters(
        "model_cache_misses",
        "Requests that waited until their model's snapshot was in host memory.",
        lambda one: one.cache_misses,
    )
    yield of_meters(
        "model_quarantines",
        "Times the model was put into quarantine, having ended its workers again and again.",
        lambda one: one.quarantines,
    )
    failures = of_meters(
        "model_self_check_failures",
        "Times the model answered the self-check's prompt wrongly and was loaded anew.",
        lambda one: one.self_check_failures,
    )
    yield from renamed(failures, "model_canary_failures")
