"""The message loop of a simulated device's worker process."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from gpupoold.domain import DeviceActivity, Targets
from gpupoold.durations import LoadStages
from gpupoold.errors import GpupoolError, NoSuchModel, Refused
from gpupoold.sim.live import SimLive
from gpupoold.sim.workloads import SimRequest
from gpupoold.simdevice.device import PacedDevice
from gpupoold.simdevice.models import KnownModel, know
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.system.process import set_log_level
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel

# Memory of an engine outside the pages of its device.
ENGINE_MEMORY = m.EngineMemory(256 << 20)

_logger = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20

_STATUS_INTERVAL_S = 0.25


@dataclass(eq=False)
class SimServer:
    """Receives the daemon's messages, drives the device in real time and sends the results.

    ``device_bytes`` and ``kv_host_bytes`` are the memory of all ``num_gpus`` GPUs.
    ``kv_host_bytes`` is the host memory for KV, None for no limit.
    """

    device_number: int
    gpu: str
    device_bytes: int
    channel: BlockingChannel[m.ToWorker]
    num_gpus: int = 1
    kv_host_bytes: int | None = None
    _known: dict[str, KnownModel] = field(default_factory=dict, init=False)
    _status_at_s: float = field(default=0.0, init=False)
    _stopping: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        number, send = self.device_number, self.channel.send
        self._device = PacedDevice(
            number, self.device_bytes, send, kv_host_bytes=self.kv_host_bytes
        )

    def run(self) -> None:
        """Serve until a ``Shutdown`` message. Raises ChannelClosed if the daemon is gone."""
        while not self._stopping:
            message = self.channel.receive(self._idle_s(time.monotonic()))
            # Work due before the message arrived takes effect before the message does.
            self._device.advance(time.monotonic())
            while message is not None and not self._stopping:
                self._handle(message)
                WORKER.main.clear()
                message = self.channel.receive(0.0)
            self._device.advance(time.monotonic())
            self._maybe_report(time.monotonic())

    def _idle_s(self, now_s: float) -> float:
        due_s = self._device.next_due_s
        wake_s = self._status_at_s if due_s is None else min(self._status_at_s, due_s)
        return max(0.0, wake_s - now_s)

    def _handle(self, message: m.ToWorker) -> None:
        match message:
            case m.AddRequest():
                with WORKER.main.doing(
                    ThreadPhase.ADD_REQUEST, message.model, [message.request_id]
                ):
                    self._add_request(message)
            case m.RunTurn():
                self._device.run_turn(message)
            case m.EndTurn():
                self._device.end_turn()
            case m.PeerHost() | m.PrefixPeer():
                os.close(self.channel.take_fd())  # no bytes are copied from the peer
            case m.MigrateOut():
                self._device.migrate_out(message)
            case m.AbortRequests():
                self._device.abort(message.request_ids)
            case m.LoadModel():
                with WORKER.main.doing(ThreadPhase.LOAD, message.model.name):
                    answer = self._load(message)
                self.channel.send(answer)
            case m.UnloadModel():
                self._unload(message.name)
            case m.SetTargets():
                if message.name in self._known:
                    targets = Targets(message.ttft_s, message.tbt_s)
                    self._device.sim.set_targets(message.name, targets)
            case m.Reconfigure():
                set_log_level(message.log_level)
            case m.Call():
                self.channel.send(self._answer(message))
            case m.Shutdown():
                self._stopping = True

    def _add_request(self, message: m.AddRequest) -> None:
        if message.kv_transfer is not None:
            os.close(self.channel.take_fd())  # the source sends only after the simulated copy
        known = self._known.get(message.model)
        num_prompt = message.num_prompt_tokens
        room = known.loaded.max_model_len - num_prompt if known else 0
        if known is None or room < 1:
            reason = (
                f"{message.model} is not loaded on device {self.device_number}"
                if known is None
                else f"a prompt of {num_prompt} tokens leaves no room for an answer: the limit of "
                f"{message.model} is {known.loaded.max_model_len} tokens for prompt and answer"
            )
            self.channel.send(m.RequestsFailed(message.model, [message.request_id], reason))
            return
        # Output tokens from before (of a resumed request) are prefilled like the prompt.
        num_before = len(message.output_token_ids)
        num_left = max(1, min(message.max_tokens or room, room) - num_before)
        request = SimRequest(
            message.request_id, message.model, message.arrival_s, num_prompt + num_before, num_left
        )
        live = SimLive(request, num_before=num_before)
        if message.is_moving:
            self._device.add_migrated(live, message.kv_transfer)
        else:
            self._device.add(live)

    def _load(self, message: m.LoadModel) -> m.ModelLoaded | m.ModelFailed:
        if message.has_snapshot:
            os.close(self.channel.take_fd())  # a simulated device has no weights to fill
        model, began_s = message.model, time.monotonic()
        try:
            known = know(model, self.gpu, self.device_bytes, self.num_gpus)
        except (GpupoolError, OSError) as error:
            _logger.exception("loading %s failed", model.name)
            return _failure(model.name, error)
        is_loaded = model.name in self._known
        dropped = self._device.remove_model(model.name) if is_loaded else []
        self._known[model.name] = known
        self._device.add_model(known.sim, known.vocabulary)
        profile = known.profile() if message.profiling_budget_s > 0 else None
        return m.ModelLoaded(
            known.loaded,
            known.layout_digest,
            False,
            profile,
            dropped=dropped,
            memory=ENGINE_MEMORY,
            stages=LoadStages(build_s=time.monotonic() - began_s),
        )

    def _unload(self, name: str) -> None:
        if self._known.pop(name, None) is not None:
            lost = self._device.remove_model(name)
            if lost:
                self.channel.send(m.RequestsFailed(name, lost, f"{name} was unloaded"))
        self.channel.send(m.ModelUnloaded(name, ENGINE_MEMORY))

    def _answer(self, call: m.Call) -> m.CallResult:
        try:
            if call.method == "page_out":
                return m.CallResult(call.call_id, self._page_out(str(call.args["model"])))
            if call.method in ("load_adapter", "unload_adapter"):
                return m.CallResult(call.call_id, {})  # no engine reads adapters here
            if call.method != "check_integrity":
                raise Refused(
                    f"device {self.device_number} simulates a {self.gpu} and cannot do "
                    f"{call.method}",
                    "a simulated device has no engine; use an emulated device or a GPU",
                )
            return m.CallResult(call.call_id, self._check_integrity())
        except GpupoolError as error:
            return m.CallResult(call.call_id, None, error.code, error.message, error.hint)
        except AssertionError as error:
            return m.CallResult(call.call_id, None, "failed", f"{call.method}: {error}")

    def _page_out(self, model: str) -> dict[str, Any]:
        """Page a model without requests out of the device."""
        if model not in self._known:
            raise NoSuchModel(f"{model} is not loaded on device {self.device_number}")
        if self._device.sim.requests.all(model):
            raise Refused(f"{model} has live requests on device {self.device_number}")
        self._device.sim.page_out(model)
        return {"kv_out_bytes": 0}

    def _check_integrity(self) -> dict[str, Any]:
        """Compare the memory of models and requests; raise AssertionError on a mismatch."""
        self._device.sim.check_memory()
        free_bytes = self._device.sim.memory.free_bytes
        return {"free_pages": free_bytes // PAGE_BYTES, "pages": self.device_bytes // PAGE_BYTES}

    def _maybe_report(self, now_s: float) -> None:
        if now_s < self._status_at_s:
            return
        self._status_at_s = now_s + _STATUS_INTERVAL_S
        sim, turn = self._device.sim, self._device.sim.turn
        models = [self._memory_of(name) for name in self._known]
        activity = DeviceActivity(
            on_turn=turn.model if turn else None,
            num_steps=sim.tally.steps,
            free_bytes=max(0, sim.memory.free_bytes),
            kv_host_bytes=sum(memory.kv_host_bytes for memory in models),
            prefetched_bytes=sim.memory.prefetched_bytes,
        )
        self.channel.send(
            m.WorkerStatus(
                at_s=now_s,
                activity=activity,
                quota_s=turn.quota_s if turn else 0.0,
                models=models,
                turn_began_s=sim.turn_began_s,
            )
        )

    def _memory_of(self, name: str) -> m.ModelMemory:
        weight_bytes, kv_bytes, host_bytes = self._device.sim.memory.held_bytes(name)
        requests = self._device.sim.requests
        return m.ModelMemory(
            model=name,
            weights_resident_bytes=weight_bytes,
            weights_total_bytes=self._known[name].loaded.weight_bytes,
            kv_resident_bytes=kv_bytes,
            kv_host_bytes=host_bytes,
            num_live=len(requests.present(name)),
            num_waiting=len(requests.unprefilled(name)),
        )


def _failure(name: str, error: GpupoolError | OSError) -> m.ModelFailed:
    if isinstance(error, GpupoolError):
        return m.ModelFailed(name, error.code, error.message, error.hint)
    hint = "check that gpupoold can read the checkpoint's folder"
    return m.ModelFailed(name, "failed", f"{name}: {error}", hint)
