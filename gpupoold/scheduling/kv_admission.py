"""KV admission: requests that may be sent to a device, others wait.

KV without space on a device is offloaded to its host cache; when the cache is full, KV would be
dropped and recomputed. So requests wait in the daemon while the reservations of sent requests
(``kv_need_bytes``) leave no space. The device provides the memory beside the weights of its largest
working model; the host cache provides the rest.

A lone request is always admitted: a guarantee of progress.

Within a model, requests that can be on time go first: the policy would defer the others
(:mod:`.prefill_order`), and deferred requests must not hold memory. A request that has waited for
``PATIENCE_S`` goes first again, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gpupoold.scheduling.prefill_order import PrefillOrder, order_of
from gpupoold.scheduling.state import DeviceState, Model, Request

# A request that has waited this long is starving.
PATIENCE_S = 60.0
# Blocks do not fill the slabs of the host cache: an eighth of a slab may stay unused.
HOST_SHARE = 7 / 8


def admits(device: DeviceState, request: Request) -> bool:
    """Return whether one more request could be sent now: its KV fits, and no request precedes
    it.
    """
    if device.up.kv_host_bytes is None:
        return True
    return _next(device, request.arrival_s, request) is request and _has_room(device, request)


def admit(device: DeviceState, now_s: float) -> None:
    """Queue requests from the line for KV memory, as far as there is memory now.

    A queued request waits again if other requests' KV has grown into its memory, or if it is
    late and a request that can be on time waits. Within a model requests keep their order except
    for priority and for late requests. The model with the least KV is next, and no other
    model gets memory until its first request fits. Thus memory accumulates for a large request
    too, and no model's backlog blocks another model. Among equals, for example on an empty device,
    the request for which memory was accumulated stays next.
    A request that has got memory in this call keeps the memory until the next call: which requests
    are late depends on the models with queued requests, so two requests could otherwise take the
    memory from each other without end.
    """
    if device.up.kv_host_bytes is None:
        return
    if device.queued and not _has_room(device):
        _put_back(device, device.queued_requests())
    admitted: set[str] = set()
    while device.waiting_for_kv:
        request = _next(device, now_s)
        if request is None:
            return
        if not (_has_room(device, request) or _gets_room(device, request, admitted, now_s)):
            device.first_for_kv = request.id
            return
        device.dequeue(request)
        device.enqueue(request)
        admitted.add(request.id)


def num_ahead(device: DeviceState, now_s: float) -> int:
    """Return the number of waiting requests that get memory before a new request."""
    lines = device.waiting_for_kv
    orders = [(name, _order(device, name, now_s)) for name in lines]
    return sum(one.id in lines[name].requests for name, order in orders for one in order.on_time)


def _gets_room(device: DeviceState, request: Request, kept: Collection[str], now_s: float) -> bool:
    """Return whether a request fits after late requests have given their memory back.

    Only a request that can be on time gets memory in this way; starving requests and the requests
    ``kept`` keep their memory.
    """
    if request not in _order(device, request.model.name, now_s).on_time:
        return False
    for name in list(device.queued):
        queued = device.queued[name].requests
        late = [one for one in _order(device, name, now_s).late if one.id in queued]
        left = [one for one in late if one.id not in kept and not _is_starving(one, now_s)]
        _put_back(device, left)
    return _has_room(device, request)


def _is_starving(request: Request, now_s: float) -> bool:
    return now_s - request.arrival_s > PATIENCE_S


def _order(device: DeviceState, name: str, now_s: float) -> PrefillOrder:
    """Return the order of a model's prompts that are not sent, with memory or without."""
    batches = [one[name] for one in (device.queued, device.waiting_for_kv) if name in one]
    return order_of(batches, device, now_s)


def _put_back(device: DeviceState, requests: Sequence[Request]) -> None:
    """Move queued requests back to waiting, before the waiting requests of their model."""
    for name in dict.fromkeys(one.model.name for one in requests):
        behind = device.waiting_for_kv.pop(name, None)
        for request in [one for one in requests if one.model.name == name]:
            device.queued[name].remove(request)
            device.enqueue(request, must_wait=True)
        for request in behind.requests.values() if behind else ():
            device.enqueue(request, must_wait=True)
        if not device.queued[name].requests:
            del device.queued[name]


def _first(device: DeviceState, name: str, now_s: float) -> tuple[Request, bool]:
    """Return the request of a model's queue that gets memory first, and whether it is late.

    A starving request is first, and counts as on time, unless another has memory already.
    """
    line, queued = device.waiting_for_kv[name].requests, device.queued.get(name)
    oldest = next(iter(line.values()))
    if _is_starving(oldest, now_s):
        others = queued.requests.values() if queued else ()
        if not any(_is_starving(other, now_s) for other in others):
            return oldest, False
    on_time = _order(device, name, now_s).on_time
    first = next((one for one in on_time if one.id in line), None)
    return (oldest, True) if first is None else (first, False)


def _next(device: DeviceState, now_s: float, newcomer: Request | None = None) -> Request | None:
    """Return the next request to get memory, among the waiting requests and ``newcomer``.

    A model that has all the KV that fits beside its weights is skipped: only its own requests can
    free memory for the next request, so the model must not block other models.
    """
    firsts = {name: _first(device, name, now_s) for name in device.waiting_for_kv}
    if newcomer is not None and firsts.get(newcomer.model.name, (newcomer, True))[1]:
        firsts[newcomer.model.name] = newcomer, False
    best, best_rank = None, (math.inf, True, math.inf)
    for request, _ in firsts.values():
        kept_bytes = _kept_bytes(device, request.model)
        own_bytes = device.up.capacity_bytes - request.model.weight_bytes
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
    assert device.up.kv_host_bytes is not None
    kept_bytes, num_requests, weight_bytes = 0.0, 0, 0
    for batch in (*device.working.values(), *device.queued.values()):
        kept_bytes += batch.kv_need_bytes
        num_requests += len(batch.requests)
        weight_bytes = max(weight_bytes, batch.model.weight_bytes)
    for request in (*device.moving.values(), *((newcomer,) if newcomer else ())):
        kept_bytes += request.kv_need_bytes
        num_requests += 1
        weight_bytes = max(weight_bytes, request.model.weight_bytes)
    room_bytes = device.up.capacity_bytes - weight_bytes + HOST_SHARE * device.up.kv_host_bytes
    return kept_bytes <= room_bytes or num_requests <= 1
