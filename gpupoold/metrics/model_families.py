"""Metrics with the label ``model``, one set per registered model from its first scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpupoold.control.requests.admission import REFUSAL_REASONS
from gpupoold.domain import FinishReason, ModelState
from gpupoold.metrics.families import Family, Scrape, counter, gauge, histogram, memories, one_each

_MODEL = ("model",)


def model_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    yield from _requests(scrape)
    yield from _tokens(scrape)
    yield from _use(scrape)
    yield from _now(scrape)
    yield from _memory(scrape)


def _requests(scrape: Scrape) -> Iterator[Family]:
    of_counts = one_each(counter, "model", scrape.counts.items())
    of_meters = one_each(counter, "model", scrape.models())
    yield of_counts("requests", "Admitted requests.", lambda counts: counts.requests)
    yield counter(
        "requests_finished",
        "Ended requests, by reason.",
        ("model", "reason"),
        (
            ((name, reason.value), meter.finished[reason])
            for name, meter in scrape.models()
            for reason in FinishReason
        ),
    )
    yield counter(
        "requests_refused",
        "Refused requests, by reason.",
        ("model", "reason"),
        (
            ((name, reason), meter.refused[reason])
            for name, meter in scrape.models()
            for reason in REFUSAL_REASONS
        ),
    )
    yield of_counts(
        "requests_dropped",
        "Admitted requests dropped before their first step, too late for the first token.",
        lambda counts: counts.dropped,
    )
    yield of_meters(
        "requests_resumed",
        "Resumptions of requests after the end of a worker, on any worker.",
        lambda meter: meter.resumed,
    )


def _tokens(scrape: Scrape) -> Iterator[Family]:
    of_counts = one_each(counter, "model", scrape.counts.items())
    of_meters = one_each(counter, "model", scrape.models())
    yield of_meters(
        "prompt_tokens", "Prompt tokens of admitted requests.", lambda meter: meter.prompt_tokens
    )
    yield of_counts(
        "output_tokens_in_time",
        "Tokens sent by their deadlines, which are fixed at the request's arrival.",
        lambda counts: counts.tokens_in_time,
    )
    yield of_counts("output_tokens", "Tokens sent.", lambda counts: counts.tokens)
    yield counter(
        "background_tokens",
        "Tokens made for batches, which no other metric of tokens counts.",
        _MODEL,
        (((name,), number) for name, number in scrape.background_tokens.items()),
    )
    of_drafts = one_each(counter, "model", scrape.drafts.items())
    yield of_drafts(
        "drafts", "Drafts verified by speculative decoding.", lambda counts: counts.num_drafts
    )
    yield of_drafts("draft_tokens", "Tokens in drafts.", lambda counts: counts.num_draft_tokens)
    yield of_drafts(
        "accepted_draft_tokens",
        "Tokens in drafts that were accepted, and sent.",
        lambda counts: counts.num_accepted_tokens,
    )
    yield gauge(
        "attainment_ratio",
        "Share of the last minute's tokens sent in time; absent without tokens.",
        _MODEL,
        (((name,), number) for name, number in scrape.attainments.items()),
    )
    yield histogram(
        "time_to_first_token_seconds",
        "Time from a request's arrival to the first token.",
        _MODEL,
        (((name,), counts.ttft) for name, counts in scrape.counts.items()),
    )
    yield histogram(
        "time_between_tokens_seconds",
        "Time between two tokens of a request.",
        _MODEL,
        (((name,), counts.tbt) for name, counts in scrape.counts.items()),
    )
    yield histogram(
        "paced_gap_seconds",
        "Time between two tokens of a paced stream, as released to the client.",
        _MODEL,
        (((name,), number) for name, number in scrape.paced.items()),
    )
    yield counter(
        "request_stage_seconds",
        "Time of requests to the first token and between tokens, by stage.",
        ("model", "phase", "stage"),
        (
            ((name, phase, stage), stage_s)
            for name, counts in scrape.counts.items()
            for phase in ("first_token", "between_tokens")
            for stage, stage_s in getattr(counts, phase).by_name().items()
        ),
    )


def _use(scrape: Scrape) -> Iterator[Family]:
    labels, names = ("model", "api_key"), set(scrape.names)
    uses = scrape.control_plane.dispatcher.accounts.usage.so_far()
    known = [(key, use) for key, use in uses.items() if key.model in names]
    yield counter(
        "gpu_seconds",
        "Seconds of steps times the device's GPUs; api_key is the public id of a key, or empty.",
        labels,
        ((key, use.gpu_s) for key, use in known),
    )
    yield counter(
        "energy_joules",
        "Energy of the devices in these seconds, up to the last full minute; without readings 0.",
        labels,
        ((key, use.energy_j) for key, use in known),
    )


def _now(scrape: Scrape) -> Iterator[Family]:
    fleet, dispatcher = scrape.control_plane.fleet, scrape.control_plane.dispatcher
    states = {name: fleet.availability(name).state for name in scrape.rows}
    yield gauge(
        "model_state",
        "1 for the model's state, 0 for other states.",
        ("model", "state"),
        (
            ((name, model.value), states[name] is model)
            for name in scrape.rows
            for model in ModelState
        ),
    )
    of_rows = one_each(gauge, "model", scrape.rows.items())
    yield of_rows(
        "target_time_to_first_token_seconds",
        "The model's target.",
        lambda row: row.spec.targets.ttft_s,
    )
    yield of_rows(
        "target_time_between_tokens_seconds",
        "The model's target.",
        lambda row: row.spec.targets.tbt_s,
    )
    yield gauge(
        "live_requests",
        "Live requests.",
        _MODEL,
        (((name,), dispatcher.live.num_of_name(name)) for name in scrape.names),
    )
    yield gauge(
        "waiting_requests",
        "Live requests before their first step.",
        _MODEL,
        (((name,), scrape.waiting[name]) for name in scrape.rows),
    )


def _memory(scrape: Scrape) -> Iterator[Family]:
    held: Counter[tuple[str, str]] = Counter()
    for worker in scrape.workers:
        for model in memories(worker):
            held[model.model, "weights"] += model.weights_resident_bytes
            held[model.model, "kv"] += model.kv_resident_bytes
            held[model.model, "kv_host"] += model.kv_host_bytes
            held[model.model, "encoder"] += model.encoder_bytes
    for of, snapshot in scrape.control_plane.cache.snapshots.items():
        held[of.model, "snapshot_host"] += snapshot.num_bytes
    yield gauge(
        "model_memory_bytes",
        "The model's memory: weights and kv on devices; encoder (outputs of the image encoder) in "
        "the devices' reserve; kv_host (offloaded KV) and snapshot_host (the weights snapshots) in "
        "host memory.",
        ("model", "kind"),
        (
            ((name, kind), held[name, kind])
            for name in scrape.rows
            for kind in ("weights", "kv", "encoder", "kv_host", "snapshot_host")
        ),
    )
    for action, text in (("saved", "copied to host memory"), ("hit", "used by later requests")):
        yield counter(
            f"prefix_{action}_bytes",
            f"KV of ended requests that was {text}, since the load of the engine.",
            ("device", "model"),
            (
                ((str(worker.number), memory.model), getattr(memory, f"prefix_{action}_bytes"))
                for worker in scrape.workers
                for memory in memories(worker)
            ),
        )
    yield counter(
        "prefix_fetched_bytes",
        "KV of ended requests that came to host memory for later requests, from the memory of "
        "another worker (peer) or from files (file), since the load of the engine.",
        ("device", "model", "tier"),
        (
            ((str(worker.number), memory.model, tier), getattr(memory, f"prefix_{tier}_bytes"))
            for worker in scrape.workers
            for memory in memories(worker)
            for tier in ("peer", "file")
        ),
    )
    of_meters = one_each(counter, "model", scrape.models())
    yield of_meters(
        "model_cache_hits",
        "Requests that arrived while their model's weights were ready.",
        lambda meter: meter.cache_hits,
    )
    yield of_meters(
        "model_cache_misses",
        "Requests that waited until their model's weights were ready.",
        lambda meter: meter.cache_misses,
    )
    yield of_meters(
        "model_quarantines",
        "Times the model was put into quarantine after repeated crashes of workers.",
        lambda meter: meter.quarantines,
    )
    yield of_meters(
        "model_self_check_failures",
        "Times the model answered the self-check's prompt wrongly and was loaded anew.",
        lambda meter: meter.self_check_failures,
    )
