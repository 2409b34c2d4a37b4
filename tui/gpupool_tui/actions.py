"""Actions on the daemon: questions, calls, and messages afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpupool_tui.dialogs import DialogChoice
from gpupool_tui.numbers import size
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import DeviceInfo, RequestInfo, TopModel
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.domain import RemoveMode
from gpupoold.units import format_duration

Call = Callable[[AdminClient], str]


class ActionPlan(NamedTuple):
    """A question with its answers, and the call for each answer.

    A call returns a sentence about its result; ``doing`` is shown meanwhile.
    """

    title: str
    text: str
    doing: str
    calls: list[tuple[DialogChoice, Call]]


def plan_pin(model: TopModel) -> ActionPlan:
    """Plan to pin or unpin a model's snapshot."""
    name, is_pinned = model.usage.name, not model.is_pinned

    def call(client: AdminClient) -> str:
        answer = client.pin(name, is_pinned)
        return f"{answer.name}: {'pinned' if answer.is_pinned else 'not pinned any more'}"

    if is_pinned:
        text = "The model's snapshot stays in host memory, also after a restart of the daemon."
        return ActionPlan(
            f"pin {name}?", text, f"pinning {name}", [(DialogChoice("pin", "pin"), call)]
        )
    text = "The model's snapshot may be evicted from host memory when other models need the memory."
    choice = DialogChoice("unpin", "unpin")
    return ActionPlan(f"unpin {name}?", text, f"unpinning {name}", [(choice, call)])


def plan_unload(model: TopModel) -> ActionPlan:
    """Plan to unload a model, in a way that its live requests permit."""
    name, num_live = model.usage.name, model.usage.num_live

    def call(mode: RemoveMode, keep_host: bool) -> Call:
        def unload(client: AdminClient) -> str:
            freed = client.unload(name, mode, keep_host=keep_host)
            host = f", {size(freed.host_bytes)} of host memory" if freed.host_bytes else ""
            return f"{freed.name}: freed {size(freed.device_bytes)} on devices{host}"

        return unload

    on_devices = size(model.usage.weights_resident_bytes + model.usage.kv_resident_bytes)
    text = f"{on_devices} on devices, {size(model.usage.cached_bytes)} in host memory.\n"
    text += "The model stays registered; the next request loads the model again."
    if num_live:
        text += f"\n{num_live} live requests."
    modes: list[tuple[RemoveMode, str]] = [("refuse", "")]
    if num_live:
        modes = [("drain", ", after the requests have ended"), ("force", ", ending the requests")]
    ways = [
        (f"free devices{'' if keep else ' and host memory'}{when}", call(mode, keep))
        for mode, when in modes
        for keep in (False, True)
    ]
    calls = [(DialogChoice(label, str(index)), act) for index, (label, act) in enumerate(ways)]
    return ActionPlan(f"unload {name}?", text, f"unloading {name}", calls)


def plan_cancel(request: RequestInfo) -> ActionPlan:
    request_id = request.request_id

    def call(client: AdminClient) -> str:
        ended = client.cancel(request_id)
        return f"{ended.request_id}: cancelled after {ended.num_output_tokens} tokens"

    text = f"{request_id}\nof {request.model} ends with an error after "
    text += f"{request.num_output_tokens} tokens."
    choice = DialogChoice("cancel the request", "cancel")
    return ActionPlan("cancel this request?", text, f"cancelling {request_id}", [(choice, call)])


def plan_drain(device: DeviceInfo) -> ActionPlan:
    """Plan to drain a device, or to return it to service."""
    number = device.device

    def drain(client: AdminClient) -> str:
        client.drain(number)
        return f"device {number}: drained; no requests until `undrain`"

    def undrain(client: AdminClient) -> str:
        client.undrain(number)
        return f"device {number}: has work again"

    if device.is_draining:
        choice = DialogChoice("undrain", "undrain")
        text = "The device gets requests again."
        return ActionPlan(
            f"undrain device {number}?", text, f"undraining {number}", [(choice, undrain)]
        )
    text = f"No new requests; its {device.num_requests} requests migrate to other devices or end."
    choice = DialogChoice("drain", "drain")
    return ActionPlan(
        f"drain device {number}?", text, f"draining device {number}", [(choice, drain)]
    )


def set_targets(name: str, ttft_s: float, tbt_s: float) -> Call:
    """Give a model other targets."""

    def call(client: AdminClient) -> str:
        model = client.set_model(name, SetModelRequest(ttft_s=ttft_s, tbt_s=tbt_s))
        return (
            f"{model.name}: {format_duration(model.ttft_s)} to the first token,"
            f" {format_duration(model.tbt_s)} between tokens"
        )

    return call
