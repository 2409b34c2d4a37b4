"""The operations of the admin API, each declared once: method, path, body, answer, docstring.

The declarations are the methods of :class:`gpupoold.api.client.AdminClient`;
:mod:`gpupoold.admin.app` registers a handler of the same name for each.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field

from gpupoold.access.rates import RateUse
from gpupoold.api import schemas, schemas_access, schemas_models
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo, Why
from gpupoold.domain import Event, RemoveMode, RequestRecord, Switch

SwitchOrder = Literal["latest", "slowest"]
Limit = Annotated[int, Field(gt=0, le=10_000)]
Count = Annotated[int, Field(ge=0, le=10_000)]
Id = Annotated[int, Field(ge=0)]
Since = Annotated[float, Field(gt=0, le=10 * 365 * 86400)]
"""Seconds before now."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Operation:
    """An operation of the admin API: a method of :class:`AdminApi`, with the method's types.

    Parameters in the braces of ``path`` are parts of the path. ``body_type`` is made of all others;
    without one, a parameter ``body`` is the body, and all others are of the query. ``is_unbounded``
    answers may take longer than the client's limit. An iterator is a stream of lines.
    """

    def __init__(
        self,
        declared: Callable[..., Any],
        method: str,
        path: str,
        body_type: type[BaseModel] | None,
        *,
        is_unbounded: bool,
    ) -> None:
        self.name = declared.__name__
        self.method = method
        self.path = path
        self.path_names = re.findall(r"{(\w+)}", path)
        self._declared = declared
        self._body_type = body_type
        self._is_unbounded = is_unbounded

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._declared)

    @functools.cached_property
    def _types(self) -> dict[str, Any]:
        return get_type_hints(self._declared, include_extras=True)

    @property
    def is_stream(self) -> bool:
        return get_origin(self._types["return"]) is Iterator

    @property
    def is_unbounded(self) -> bool:
        return self._is_unbounded or self.is_stream

    @property
    def answer(self) -> Any:
        """Type of the answer, or of a line of a stream."""
        answer = self._types["return"]
        return get_args(answer)[0] if self.is_stream else answer

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """Parameters of the operation's handler, by name, with types."""
        found = {
            name: parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=self._types[name])
            for name, parameter in self._signature.parameters.items()
            if name in self._types and (self._body_type is None or name in self.path_names)
        }
        if self._body_type is not None:
            kind = inspect.Parameter.KEYWORD_ONLY
            found["body"] = inspect.Parameter("body", kind, annotation=self._body_type)
        return [*found.values()]

    def split(
        self, args: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], BaseModel | None]:
        """Return the arguments of a call for the path, for the query and as the body."""
        bound = self._signature.bind(None, *args, **options)
        bound.apply_defaults()
        given = bound.arguments
        given.pop("self")
        parts = {name: given.pop(name) for name in self.path_names}
        if self._body_type is not None:
            return parts, {}, self._body_type(**given)
        body = given.pop("body", None)
        return parts, {name: value for name, value in given.items() if value is not None}, body


OPERATIONS: dict[str, Operation] = {}
"""All operations by name."""


def _operation(
    method: str, path: str, body_type: type[BaseModel] | None = None, *, unbounded: bool = False
) -> Callable[[_Method], _Method]:
    def declare(declared: _Method) -> _Method:
        operation = Operation(declared, method, path, body_type, is_unbounded=unbounded)
        OPERATIONS[operation.name] = operation

        @functools.wraps(declared)
        def call(self: AdminApi, *args: Any, **options: Any) -> Any:
            return self.call(operation, *operation.split(args, options))

        return cast(_Method, call)

    return declare


class AdminApi:
    """The operations.

    Each raises ``DaemonNotRunning`` if nothing answers at the socket, ``TimedOut`` if the answer
    takes too long, ``Refused`` if the socket may not be opened, ``NoSuchModel`` or ``UsageError``
    if no model or device has the name, and the error in the daemon's answer.
    """

    def call(
        self,
        operation: Operation,
        parts: Mapping[str, Any],
        query: Mapping[str, Any],
        body: BaseModel | None,
    ) -> Any:
        """Return the answer to a call with these parts of the path, this query and this body."""
        raise NotImplementedError

    @_operation("GET", "/status")
    def status(self) -> schemas.Status:
        """Return the daemon's status."""

    @_operation("GET", "/models")
    def models(self) -> list[schemas_models.ModelInfo]:
        """Return the registered models."""

    @_operation("GET", "/models/{name}")
    def model(self, name: str) -> schemas_models.ModelInfo:
        """Return the model with this name or alias."""

    @_operation("POST", "/models")
    def add_model(self, body: schemas_models.AddModelRequest) -> Iterator[schemas_models.Progress]:
        """Register a model and yield the progress; the last ``Progress`` has ``model``.

        With ``detach`` the last line may have the stage ``detached`` instead.
        """

    @_operation("POST", "/adapters")
    def add_adapter(
        self, body: schemas_models.AddAdapterRequest
    ) -> Iterator[schemas_models.Progress]:
        """Add a LoRA adapter and yield the progress; the last ``Progress`` has the base."""

    @_operation("POST", "/presets", unbounded=True)
    def add_preset(self, body: schemas_models.AddPresetRequest) -> schemas_models.ModelInfo:
        """Add a preset; return its model.

        Raises:
            Refused: the name is taken.
            UsageError: a default cannot be set.
        """

    @_operation("PATCH", "/models/{name}", unbounded=True)
    def set_model(
        self, name: str, body: schemas_models.SetModelRequest
    ) -> schemas_models.ModelInfo:
        """Change a model's targets, aliases or options; return the changed model.

        The daemon makes one change of a model at a time: the call waits for loads of the model.
        Raises Refused: an alias is taken.
        """

    @_operation("DELETE", "/models/{name}", unbounded=True)
    def remove_model(self, name: str, mode: RemoveMode = "refuse") -> schemas_models.ModelInfo:
        """Remove a model from the registry; return the model's last state.

        ``mode`` decides about live requests: ``refuse`` keeps the model if there are any, ``drain``
        waits, ``force`` aborts the requests. The call waits for another change in progress. Raises
        Refused: the model has live requests and ``mode`` is ``refuse``.
        """

    @_operation("PUT", "/hosting/{name}", schemas.SetHostingRequest, unbounded=True)
    def host(self, name: str, devices: Sequence[int]) -> schemas_models.ModelInfo:
        """Choose the devices of a model's engines; no devices leave the choice to the scheduler.

        Returns when the devices in service have loaded the model. Raises GpupoolError: a device
        could not load the model; the choice holds.
        """

    @_operation("DELETE", "/loaded/{name}", unbounded=True)
    def unload(
        self, name: str, mode: RemoveMode = "refuse", *, keep_host: bool = False
    ) -> schemas.Unloaded:
        """Free a model's memory on all devices and on the host; the next request restores the
        model.

        ``mode`` decides about live requests: ``refuse`` changes nothing if there are any, ``drain``
        waits, ``force`` aborts the requests. Raises Refused: the model has live requests and
        ``mode`` is ``refuse``, or its snapshot is pinned.
        """

    @_operation("GET", "/cache")
    def cache(self) -> schemas.CacheInfo:
        """Return the models' weights snapshots and the use of the budgets."""

    @_operation("PATCH", "/cache/{name}", schemas.SetCachedRequest)
    def pin(self, name: str, is_pinned: bool = True) -> schemas.CachedModel:
        """Pin a model's snapshot in host memory, or unpin the snapshot.

        Raises Refused: the pinned snapshots would exceed the cache.
        """

    @_operation("DELETE", "/cache/{name}", unbounded=True)
    def drop_snapshot(self, name: str) -> schemas.CachedModel:
        """Drop a model's snapshot from host memory; the next request restores the snapshot.

        Raises Refused: the snapshot is pinned, in use or loading.
        """

    @_operation("POST", "/cache/{name}", unbounded=True)
    def warm(self, name: str) -> schemas.CachedModel:
        """Load a model's snapshot into host memory; return at the end of the load."""

    @_operation("PATCH", "/devices/{device}", schemas.SetDeviceRequest)
    def set_role(self, device: int, role: schemas.RoleName) -> schemas.DeviceInfo:
        """Set a worker's role; ``auto`` leaves the choice to the policy."""

    @_operation("POST", "/devices/{device}/drain", unbounded=True)
    def drain(self, device: int) -> schemas.DeviceInfo:
        """Drain a worker: return when no requests are left; ``undrain`` ends the state.

        Raises TimedOut: requests are left after the configured time.
        """

    @_operation("DELETE", "/devices/{device}/drain")
    def undrain(self, device: int) -> schemas.DeviceInfo:
        """End the drain of a worker."""

    @_operation("POST", "/devices/{device}/park", unbounded=True)
    def park(self, device: int) -> schemas.DeviceInfo:
        """Make a device without requests give its memory back, until a request or ``wake``.

        Raises Refused: the device has requests or a load, or is not ready.
        """

    @_operation("DELETE", "/devices/{device}/park")
    def wake(self, device: int) -> schemas.DeviceInfo:
        """Wake a parked device."""

    @_operation("POST", "/devices/{device}/operations", schemas.OperateRequest, unbounded=True)
    def operate(self, device: int, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run an operation of the module in ``GPUPOOL_OPERATIONS`` on a worker; may take minutes.

        Raises:
            UsageError: there is no such operation.
            Refused: the daemon's environment names no module.
        """

    @_operation("GET", "/config")
    def config(self) -> schemas.ConfigInfo:
        """Return all configuration keys with the daemon's values."""

    @_operation("POST", "/config/diff", schemas.DiffRequest)
    def config_diff(self, text: str | None = None, name: str = "") -> schemas.DiffInfo:
        """Compare the ``text`` of a file called ``name``, or the daemon's file, with the settings.

        Raises ConfigError: the file has an error.
        """

    @_operation("POST", "/reload")
    def reload(self) -> schemas.ReloadInfo:
        """Make the daemon read its configuration again.

        Raises:
            ConfigError: the file has an error; nothing has changed.
            Refused: a change is impossible now; nothing has changed.
        """

    @_operation("GET", "/machine")
    def machine(self) -> schemas.MachineInfo:
        """Return folders and limits as the daemon finds them."""

    @_operation("POST", "/check")
    def check(self) -> list[dict[str, int]]:
        """Check every worker's accounts against its device's page tables; return page counts.

        Raises Failed: the accounts disagree, or a worker is down.
        """

    @_operation("GET", "/ps")
    def ps(self) -> schemas.Ps:
        """Return the present devices, models and live requests."""

    @_operation("GET", "/top")
    def top(
        self,
        turns_after: Id = 0,
        events_after: Id | None = None,
        *,
        turns: Count = 2000,
        events: Count = 100,
        requests: Count = 500,
        minutes: bool = True,
    ) -> schemas.Top:
        """Return the present state, with at most so many turns and events after these ids.

        Without ``minutes`` the models' attainment by minute is left out.
        """

    @_operation("GET", "/turns")
    def turns(self, after: Id = 0, limit: Limit = 1000) -> list[schemas.TurnInfo]:
        """Return the latest ``limit`` turns with ids above ``after``, oldest first."""

    @_operation("DELETE", "/requests/{request_id}")
    def cancel(self, request_id: str) -> schemas.CancelledRequest:
        """End a live request with an error for the client."""

    @_operation("GET", "/why/{name}")
    def why(self, name: str) -> Why:
        """Explain where a model or request is; part of a request's id suffices.

        Raises:
            NoSuchModel: no model or request has this name or id.
            UsageError: several live requests match the id.
        """

    @_operation("GET", "/switches")
    def switches(
        self,
        limit: Limit = 20,
        model: str | None = None,
        device: Id | None = None,
        since_s: Since | None = None,
        order: SwitchOrder = "latest",
    ) -> list[Switch]:
        """Return the latest or slowest ``limit`` switches, filtered by model, device and age."""

    @_operation("GET", "/history")
    def history(self, model: str | None = None, since_s: Since = 3600.0) -> list[SpanInfo]:
        """Return counts of requests by time span, oldest first; spans grow with the period."""

    @_operation("GET", "/history/models")
    def history_by_model(
        self, model: str | None = None, since_s: Since = 3600.0
    ) -> list[ModelSpan]:
        """Return counts of the last ``since_s`` seconds by model, in order of names."""

    @_operation("GET", "/history/requests")
    def past_requests(
        self,
        model: str | None = None,
        since_s: Since = 3600.0,
        limit: Limit = 100,
        request_id: str | None = None,
    ) -> list[RequestRecord]:
        """Return finished requests, latest arrival first.

        ``request_id`` is an id, or part of it, as in ``ps`` or as a client saw it.
        """

    @_operation("GET", "/requests")
    def requests(self, limit: Limit = 10_000) -> Iterator[RequestRecord]:
        """Yield the latest ``limit`` finished requests, latest arrival first."""

    @_operation("GET", "/usage")
    def usage(self, since_s: Since = 3600.0) -> schemas.UsageInfo:
        """Return the use of the GPUs in the hours of the last ``since_s`` seconds."""

    @_operation("GET", "/event-log")
    def event_log(self) -> Iterator[bytes]:
        """Yield the lines of the scheduling core's event log, without newlines.

        :mod:`gpupoold.replay.log_file` reads the lines.
        """

    @_operation("GET", "/events")
    def events(
        self, after: int | None = None, limit: Limit = 100, *, follow: bool = False
    ) -> list[Event]:
        """Return up to ``limit`` events by id: those after ``after``, or the latest.

        With ``follow`` the answer is a stream, see ``AdminClient.follow_events``.
        """

    @_operation("GET", "/logs")
    def logs(
        self,
        lines: Annotated[int, Field(ge=0, le=100_000)] = 100,
        process: str | None = None,
        follow: bool = False,
    ) -> Iterator[schemas.LogLine]:
        """Yield the last ``lines`` lines of the daemon's log or of one process's log.

        With ``follow``, new lines follow until the daemon stops.
        """

    @_operation("GET", "/metrics")
    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' format for text."""

    @_operation("GET", "/batches")
    def batches(self, limit: Limit = 100, *, ended: bool = False) -> list[schemas.BatchInfo]:
        """Return the latest batches of all keys."""

    @_operation("GET", "/keys")
    def api_keys(self, *, revoked: bool = False) -> list[schemas_access.KeyInfo]:
        """Return all API keys by name, with their use."""

    @_operation("POST", "/keys")
    def add_key(self, body: schemas_access.AddKeyRequest) -> schemas_access.NewKey:
        """Create a key; only this answer contains the key's text.

        Raises UsageError, Refused: the name is invalid or taken.
        """

    @_operation("PATCH", "/keys/{name}")
    def set_key(self, name: str, body: schemas_access.SetKeyRequest) -> schemas_access.KeyInfo:
        """Change a key's rights and limits, from the next request on.

        Raises NoSuchKey: there is no key of this name; also of the next operations.
        """

    @_operation("POST", "/keys/{name}/rotate", schemas_access.RotateKeyRequest)
    def rotate_key(self, name: str, grace_s: float) -> schemas_access.NewKey:
        """Give a key a new secret; the old secret stays valid for ``grace_s`` seconds."""

    @_operation("DELETE", "/keys/{name}")
    def remove_key(self, name: str) -> schemas_access.KeyInfo:
        """Revoke a key; the key's running requests continue."""

    @_operation("GET", "/fleet")
    def fleet_report(self) -> schemas_access.FleetReport:
        """Return what the fleet needs to know of the daemon."""

    @_operation("POST", "/fleet/charges", schemas_access.ChargeKeysRequest)
    def charge_keys(self, uses: dict[str, RateUse]) -> schemas_access.FleetReport:
        """Charge use of API keys on other nodes to the rates of the daemon's keys."""

    @_operation("PUT", "/fleet", schemas_access.SetFleetRequest)
    def set_fleet_secret(self, secret: str) -> schemas_access.FleetReport:
        """Let the daemon take requests of a fleet's entrance; an empty secret ends that.

        Raises UsageError, Failed: the secret has another form, or cannot be stored.
        """
