"""The client of the admin API, for the command line and the terminal UI.

Synchronous, over the unix socket. Every failure is one of ``gpupoold.errors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpupoold.api.answers import (
    as_error,
    not_understood,
)
from gpupoold.api.calls import given
from gpupoold.api.client_access import KeyCalls
from gpupoold.api.client_fleet import NodeCalls
from gpupoold.api.client_top import TopCalls
from gpupoold.api.schemas import (
    DeviceInfo,
    EventInfo,
    LogLine,
    Ps,
    RequestRecord,
    RoleName,
    SetDeviceRequest,
    SetHostingRequest,
    Status,
)
from gpupoold.api.schemas_bench import BenchMemoryRequest, BenchSwitchRequest
from gpupoold.api.schemas_cache import CachedModel, CacheInfo, SetCachedRequest
from gpupoold.api.schemas_config import ConfigInfo, DiffInfo, DiffRequest, ReloadInfo
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo, Why
from gpupoold.api.schemas_machine import MachineInfo
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddModelRequest,
    AddPresetRequest,
    ModelInfo,
    Progress,
    SetModelRequest,
)
from gpupoold.api.schemas_usage import UsageInfo
from gpupoold.domain import Switch
from gpupoold.errors import (
    Failed,
)

RemoveMode = Literal["refuse", "drain", "force"]
SwitchOrder = Literal["latest", "slowest"]

_MODELS = TypeAdapter(list[ModelInfo])
_SWITCHES = TypeAdapter(list[Switch])
_SPANS = TypeAdapter(list[SpanInfo])
_MODEL_SPANS = TypeAdapter(list[ModelSpan])
_USAGE = TypeAdapter(UsageInfo)
_RECORDS = TypeAdapter(list[RequestRecord])
_WHY = TypeAdapter(Why)
_EVENTS = TypeAdapter(list[EventInfo])
_OBJECT = TypeAdapter(dict[str, Any])
_STATUS = TypeAdapter(Status)
_ACCOUNTS = TypeAdapter(list[dict[str, int]])
_DEVICE = TypeAdapter(DeviceInfo)
_PS = TypeAdapter(Ps)
_MODEL = TypeAdapter(ModelInfo)
_CACHE = TypeAdapter(CacheInfo)
_CACHED = TypeAdapter(CachedModel)
_CONFIG = TypeAdapter(ConfigInfo)
_MACHINE = TypeAdapter(MachineInfo)
_DIFF = TypeAdapter(DiffInfo)
_RELOAD = TypeAdapter(ReloadInfo)


class AdminClient(KeyCalls, NodeCalls, TopCalls):
    """A client of the daemon at ``socket_path``; use as a context manager.

    ``timeout_s`` bounds connecting and each plain answer. Long operations (adding, draining,
    following, benchmarks) have no limit on the answer.

    Every method raises ``DaemonNotRunning`` if nothing answers at the socket, ``TimedOut`` if the
    answer takes too long, ``Refused`` if the socket may not be opened, and the error in the
    daemon's answer.
    """

    def status(self) -> Status:
        """Return the daemon's status."""
        return self._call(_STATUS, "GET", "/status")

    def models(self) -> list[ModelInfo]:
        return self._call(_MODELS, "GET", "/models")

    def model(self, name: str) -> ModelInfo:
        """Return the model with this name or alias.

        Raises:
            NoSuchModel: there is none.
        """
        return self._call(_MODEL, "GET", _model_path(name))

    def add_model(self, request: AddModelRequest) -> Iterator[Progress]:
        """Register a model and yield the progress; the last ``Progress`` has ``model``.

        With ``detach`` the last line may have the stage ``detached`` instead.

        Raises:
            GpupoolError: while iterating, when the daemon reports a failure.
        """
        return self._progress("/models", request)

    def add_adapter(self, request: AddAdapterRequest) -> Iterator[Progress]:
        """Add a LoRA adapter and yield the progress; the last ``Progress`` has the base as
        ``model``.

        Raises:
            GpupoolError: while iterating, when the daemon reports a failure.
        """
        return self._progress("/adapters", request)

    def add_preset(self, request: AddPresetRequest) -> ModelInfo:
        """Add a preset; return its model.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the name is taken.
            UsageError: a default cannot be set.
        """
        return self._call(_MODEL, "POST", "/presets", body=request, unbounded=True)

    def _progress(
        self, path: str, request: AddModelRequest | AddAdapterRequest
    ) -> Iterator[Progress]:
        finished = False
        for line in self._stream("POST", path, body=request):
            progress = _parsed(Progress, line, f"POST {path}")
            if progress.error is not None:
                raise as_error(progress.error)
            finished = progress.model is not None or progress.stage == "detached"
            yield progress
        if not finished:
            raise Failed(
                f"the daemon ended the work on {request.name!r} without a result",
                "see `gpupool logs` and `gpupool events`",
            )

    def set_model(self, name: str, request: SetModelRequest) -> ModelInfo:
        """Change a model's targets or aliases; return the changed model.

        The daemon makes one change of a model at a time: the call waits for loads of the model.

        Raises:
            NoSuchModel: there is no such model.
            Refused: an alias is taken.
        """
        return self._call(_MODEL, "PATCH", _model_path(name), body=request, unbounded=True)

    def remove_model(self, name: str, mode: RemoveMode = "refuse") -> ModelInfo:
        """Remove a model from the registry; return the model's last state.

        ``mode`` decides about live requests: ``refuse`` keeps the model if there are any, ``drain``
        waits, ``force`` aborts the requests. The call waits for another change in progress.

        Raises:
            NoSuchModel: there is no such model.
            Refused: the model has live requests and ``mode`` is ``refuse``.
        """
        return self._call(_MODEL, "DELETE", _model_path(name), query={"mode": mode}, unbounded=True)

    def cache(self) -> CacheInfo:
        """Return the models' weights snapshots and the use of the budgets."""
        return self._call(_CACHE, "GET", "/cache")

    def pin(self, name: str, is_pinned: bool = True) -> CachedModel:
        """Pin a model's snapshot in host memory, or unpin the snapshot.

        Raises:
            NoSuchModel: there is no such model.
            Refused: the pinned snapshots would exceed the cache.
        """
        body = SetCachedRequest(is_pinned=is_pinned)
        return self._call(_CACHED, "PATCH", _cache_path(name), body=body)

    def drop_snapshot(self, name: str) -> CachedModel:
        """Drop a model's snapshot from host memory; the next request restores the snapshot.

        Raises:
            NoSuchModel: there is no such model.
            Refused: the snapshot is pinned, in use or loading.
        """
        return self._call(_CACHED, "DELETE", _cache_path(name), unbounded=True)

    def warm(self, name: str) -> CachedModel:
        """Load a model's snapshot into host memory; return at the end of the load.

        Raises:
            NoSuchModel: there is no such model.
            GpupoolError: the reason why the snapshot cannot be loaded.
        """
        return self._call(_CACHED, "POST", _cache_path(name), unbounded=True)

    def host(self, name: str, devices: Sequence[int]) -> ModelInfo:
        """Choose the devices of a model's engines; no devices leave the choice to the scheduler.

        Returns when the devices in service have loaded the model.

        Raises:
            NoSuchModel: there is no such model.
            UsageError: there is no such device.
            GpupoolError: a device could not load the model; the choice holds.
        """
        body = SetHostingRequest(devices=[*devices])
        path = f"/hosting/{quote(name, safe='/')}"
        return self._call(_MODEL, "PUT", path, body=body, unbounded=True)

    def set_role(self, device: int, role: RoleName) -> DeviceInfo:
        """Set a worker's role; ``auto`` leaves the choice to the policy.

        Raises:
            UsageError: there is no such worker.
        """
        body = SetDeviceRequest(role=role)
        return self._call(_DEVICE, "PATCH", f"/devices/{device}", body=body)

    def drain(self, device: int) -> DeviceInfo:
        """Drain a worker: return when no requests are left; ``undrain`` ends the state.

        Raises:
            UsageError: there is no such worker.
            TimedOut: requests are left after the configured time.
        """
        return self._call(_DEVICE, "POST", f"/devices/{device}/drain", unbounded=True)

    def park(self, device: int) -> DeviceInfo:
        """Make a device without requests give its memory back, until a request or ``wake``.

        Raises:
            UsageError: there is no such device.
            Refused: the device has requests or a load, or is not ready.
        """
        return self._call(_DEVICE, "POST", f"/devices/{device}/park", unbounded=True)

    def wake(self, device: int) -> DeviceInfo:
        """Wake a parked device.

        Raises:
            UsageError: there is no such device.
        """
        return self._call(_DEVICE, "DELETE", f"/devices/{device}/park")

    def undrain(self, device: int) -> DeviceInfo:
        """End the drain of a worker.

        Raises:
            UsageError: there is no such worker.
        """
        return self._call(_DEVICE, "DELETE", f"/devices/{device}/drain")

    def config(self) -> ConfigInfo:
        """Return all configuration keys with the daemon's values."""
        return self._call(_CONFIG, "GET", "/config")

    def machine(self) -> MachineInfo:
        """Return folders and limits as the daemon finds them."""
        return self._call(_MACHINE, "GET", "/machine")

    def config_diff(self, text: str | None = None, name: str = "") -> DiffInfo:
        """Compare the ``text`` of a file called ``name``, or the daemon's file, with the
        settings.

        Raises:
            ConfigError: the file has an error.
        """
        body = DiffRequest(text=text, name=name)
        return self._call(_DIFF, "POST", "/config/diff", body=body)

    def reload(self) -> ReloadInfo:
        """Make the daemon read its configuration again.

        Raises:
            ConfigError: the file has an error; nothing has changed.
            Refused: a change is impossible now; nothing has changed.
        """
        return self._call(_RELOAD, "POST", "/reload")

    def check(self) -> list[dict[str, int]]:
        """Check every worker's accounts against its device's page tables; return page counts.

        Raises:
            Failed: the accounts disagree, or a worker is down.
        """
        return self._call(_ACCOUNTS, "POST", "/check")

    def ps(self) -> Ps:
        """Return the present devices, models and live requests."""
        return self._call(_PS, "GET", "/ps")

    def switches(
        self,
        limit: int = 20,
        *,
        model: str | None = None,
        device: int | None = None,
        since_s: float | None = None,
        order: SwitchOrder = "latest",
    ) -> list[Switch]:
        """Return the latest or slowest ``limit`` switches, filtered by model, device and age."""
        query = given(limit=limit, model=model, device=device, since_s=since_s, order=order)
        return self._call(_SWITCHES, "GET", "/switches", query=query)

    def why(self, name: str) -> Why:
        """Explain where a model or request is; part of a request's id suffices.

        Raises:
            NoSuchModel: no model or request has this name or id.
            UsageError: several live requests match the id.
        """
        return self._call(_WHY, "GET", f"/why/{quote(name, safe='/')}")

    def history(self, model: str | None = None, since_s: float = 3600.0) -> list[SpanInfo]:
        """Return counts of requests by time span, oldest first; spans grow with the period."""
        return self._call(_SPANS, "GET", "/history", query=given(model=model, since_s=since_s))

    def history_by_model(
        self, model: str | None = None, since_s: float = 3600.0
    ) -> list[ModelSpan]:
        """Return counts of the last ``since_s`` seconds by model, in order of names."""
        query = given(model=model, since_s=since_s)
        return self._call(_MODEL_SPANS, "GET", "/history/models", query=query)

    def usage(self, since_s: float = 3600.0) -> UsageInfo:
        """Return the use of the GPUs in the hours of the last ``since_s`` seconds."""
        return self._call(_USAGE, "GET", "/usage", query=given(since_s=since_s))

    def past_requests(
        self,
        model: str | None = None,
        since_s: float = 3600.0,
        limit: int = 100,
        request_id: str | None = None,
    ) -> list[RequestRecord]:
        """Return finished requests, latest arrival first.

        ``request_id`` is an id, or part of it, as in ``ps`` or as a client saw it.
        """
        query = given(model=model, since_s=since_s, limit=limit, request_id=request_id)
        return self._call(_RECORDS, "GET", "/history/requests", query=query)

    def event_log(self) -> Iterator[bytes]:
        """Yield the lines of the scheduling core's event log, without newlines.

        :mod:`gpupoold.replay.log_file` reads the lines.
        """
        yield from self._stream("GET", "/event-log")

    def requests(self, limit: int = 10_000) -> Iterator[RequestRecord]:
        """Yield the latest ``limit`` finished requests (at most 10,000), latest arrival first."""
        for line in self._stream("GET", "/requests", query={"limit": limit}):
            yield _parsed(RequestRecord, line, "GET /requests")

    def events(self, after: int | None = None, limit: int = 100) -> list[EventInfo]:
        """Return up to ``limit`` events by id: those after ``after``, or the latest."""
        return self._call(_EVENTS, "GET", "/events", query=given(after=after, limit=limit))

    def follow_events(self, after: int | None = None) -> Iterator[EventInfo]:
        """Yield events after ``after``, then new events until the daemon stops."""
        query = {"follow": "true", **given(after=after)}
        for line in self._stream("GET", "/events", query=query):
            yield _parsed(EventInfo, line, "GET /events")

    def logs(
        self, lines: int = 100, process: str | None = None, follow: bool = False
    ) -> Iterator[LogLine]:
        """Yield the last ``lines`` lines of the daemon's log or of one process's log.

        With ``follow``, new lines follow until the daemon stops.
        """
        query = given(lines=lines, process=process, follow="true" if follow else None)
        for line in self._stream("GET", "/logs", query=query):
            yield _parsed(LogLine, line, "GET /logs")

    def bench_switch(self, request: BenchSwitchRequest) -> dict[str, Any]:
        """Alternate between two models on an idle worker and measure; may take minutes.

        Raises:
            Refused: no worker is idle, or the models are not loaded.
        """
        return self._call(_OBJECT, "POST", "/bench/switch", body=request, unbounded=True)

    def bench_memory(self, request: BenchMemoryRequest) -> dict[str, Any]:
        """Measure memory operations on an idle worker; may take minutes.

        Raises:
            Refused: no worker is idle, or the worker has too little memory.
        """
        return self._call(_OBJECT, "POST", "/bench/memory", body=request, unbounded=True)


_Body = TypeVar("_Body", bound=BaseModel)


def _parsed(kind: type[_Body], line: bytes, what: str) -> _Body:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise not_understood(what, error) from error


def _model_path(name: str) -> str:
    return f"/models/{quote(name, safe='/')}"


def _cache_path(name: str) -> str:
    return f"/cache/{quote(name, safe='/')}"
