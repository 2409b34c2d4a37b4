"""KV admission: which requests may be sent to a device, and which wait.

KV without space on a device is offloaded to its host cache; when the cache is full, KV would be
dropped and recomputed. So requests wait in the daemon while the reservations of sent requests
(``kv_need_bytes``) leave no space. The device provides the memory beside the weights of its largest
working model; the host cache provides the rest.

A lone request is always admitted, which guarantees progress.
"""

from __future__ import annotations

import math

from gpupoold.scheduling.state import DeviceState, Model, Request

# Blocks do not fill the slabs of the host cache: an eighth of a slab may stay unused.
HOST_SHARE = 7 / 8


def admits(device: DeviceState, request: Request) -> bool:
    """Return whether one more request could be sent now: its KV fits, and no request precedes
    it.
    """
    if device.kv_host_bytes is None:
        return True
    return _next(device, request) is request and _has_room(device, request)


def admit(device: DeviceState) -> None:
    """Queue requests that waited for KV memory, as far as there is memory now.

    A queued request waits again if other requests' KV has grown into its memory. Within a model
    requests keep their order except for priority. The model with the least KV is next, and no other
    model gets memory until its first request fits. Thus memory accumulates for a large request
    too, and no model's backlog blocks another model. Among equals, for example on an empty device,
    the request for which memory was accumulated stays next.
    """
    if device.kv_host_bytes is None:
        return
    if device.queued and not _has_room(device):
        _put_back(device)
    while device.waiting_for_kv:
        request = _next(device)
        if request is None:
            return
        if not _has_room(device, request):
            device.first_for_kv = request.id
            return
        device.dequeue(request)
        device.enqueue(request)


def _put_back(device: DeviceState) -> None:
    """Move all queued requests back to waiting, before the waiting requests of their model."""
    for name, batch in device.queued.items():
        behind = device.waiting_for_kv.pop(name, None)
        for one in (batch, behind) if behind else (batch,):
            for request in one.requests.values():
                device.enqueue(request, must_wait=True)
    device.queued.clear()


def _next(device: DeviceState, newcomer: Request | None = None) -> Request | None:
    """Return the next request to get memory, among the waiting requests and ``newcomer``.

    A model that has all the KV that fits beside its weights is skipped: only its own requests can
    free memory for the next request, so the model must not block other models.
    """
    firsts = [next(iter(line.requests.values())) for line in device.waiting_for_kv.values()]
    if newcomer is not None and newcomer.model.name not in device.waiting_for_kv:
        firsts.append(newcomer)
    best, best_rank = None, (math.inf, True, math.inf)
    for request in firsts:
        kept_bytes = _kept_bytes(device, request.model)
        own_bytes = device.capacity_bytes - request.model.weight_bytes
        if kept_bytes and kept_bytes + request.kv_need_bytes > own_bytes:
            continue
        rank = kept_bytes, request.id != device.first_for_kv, request.arrival_s
        if best is None or rank < best_rank:
            best, best_rank = request, rank
    return best


def _kept_bytes(device: DeviceState, model: Model) -> float:
    """Return the bytes of KV reserved for the requests of one model."""
    kept_bytes = 0.0
    for batches in (device.working, device.queued):
        if model.name in batches:
            kept_bytes += batches[model.name].kv_need_bytes
    for request in device.moving.values():
        if request.model is model:
            kept_bytes += request.kv_need_bytes
    return kept_bytes


def _has_room(device: DeviceState, newcomer: Request | None = None) -> bool:
    """Return whether all sent and queued requests, and ``newcomer``, fit."""
    assert device.kv_host_bytes is not None
    kept_bytes, num_requests, weight_bytes = 0.0, 0, 0
    for batch in (*device.working.values(), *device.queued.values()):
        kept_bytes += batch.kv_need_bytes
        num_requests += len(batch.requests)
        weight_bytes = max(weight_bytes, batch.model.weight_bytes)
    for request in (*device.moving.values(), *((newcomer,) if newcomer else ())):
        kept_bytes += request.kv_need_bytes
        num_requests += 1
        weight_bytes = max(weight_bytes, request.model.weight_bytes)
    room_bytes = device.capacity_bytes - weight_bytes + HOST_SHARE * device.kv_host_bytes
    return kept_bytes <= room_bytes or num_requests <= 1
