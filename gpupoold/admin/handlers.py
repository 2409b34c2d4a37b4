"""The handlers of the admin API's operations, see :mod:`gpupoold.api.admin_api`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from gpupool_state import KeyRow, ModelRow, RequestRow
from gpupool_state.batches import BatchRow, read_batches
from gpupoold.access.fleet import is_secret
from gpupoold.admin import top_view
from gpupoold.api.admin_api import SwitchOrder
from gpupoold.api.request_ids import request_id_of
from gpupoold.api.schemas import (
    BatchInfo,
    CachedModel,
    CacheInfo,
    CancelledRequest,
    ConfigInfo,
    DeviceInfo,
    DiffInfo,
    DiffRequest,
    ErrorBody,
    LogLine,
    MachineInfo,
    OperateRequest,
    ReloadInfo,
    SetCachedRequest,
    SetDeviceRequest,
    SetHostingRequest,
    Status,
    Unloaded,
    UsageInfo,
)
from gpupoold.api.schemas_access import (
    AddKeyRequest,
    ChargeKeysRequest,
    FleetReport,
    KeyInfo,
    NewKey,
    RotateKeyRequest,
    SetFleetRequest,
    SetKeyRequest,
)
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo, Why
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddModelRequest,
    AddPresetRequest,
    ModelInfo,
    Progress,
    SetModelRequest,
)
from gpupoold.api_keys import KeyFacts, KeyPowers
from gpupoold.control.control_plane import ControlPlane
from gpupoold.control.models.descriptions import model_info
from gpupoold.control.operations import Configuration
from gpupoold.control.views.bodies import ModelSums, Spans, fleet_models, span_s, usage_info
from gpupoold.domain import Event, RemoveMode, RequestRecord, Role, Switch
from gpupoold.errors import Failed, GpupoolError, UsageError
from gpupoold.files import hint_to_write
from gpupoold.logs.files import old_file
from gpupoold.metrics.exposition import CONTENT_TYPE, Exporter

# Age of the use of the GPUs that an answer may lack.
FRESH_S = 2.0
_FOLLOW_WAIT_S = 10.0
_LINES_AT_ONCE = 200
_RECORD = TypeAdapter(RequestRecord)

_POLL_S = 0.25
_MAX_TAIL_BYTES = 8 << 20


class Handlers:
    """A handler for each operation, of the operation's name and parameters.

    An iterator is answered as a stream; a ``Response`` is sent as it is.
    """

    def __init__(self, control_plane: ControlPlane, exporter: Exporter) -> None:
        self._control = control_plane
        self._exporter = exporter

    # Models.

    async def models(self) -> list[ModelInfo]:
        return await self._control.models()

    async def model(self, name: str) -> ModelInfo:
        return await self._control.model(name)

    async def add_model(self, body: AddModelRequest) -> AsyncIterator[str]:
        return _progress_lines(self._control.lifecycle.add(body))

    async def add_adapter(self, body: AddAdapterRequest) -> AsyncIterator[str]:
        return _progress_lines(self._control.lifecycle.add_adapter(body))

    async def add_preset(self, body: AddPresetRequest) -> ModelInfo:
        return model_info(await self._control.lifecycle.presets.add(body))

    async def set_model(self, name: str, body: SetModelRequest) -> ModelInfo:
        return self._present(await self._control.lifecycle.set(name, body))

    async def remove_model(self, name: str, mode: RemoveMode) -> ModelInfo:
        return model_info(await self._control.lifecycle.remove(name, mode))

    async def host(self, name: str, body: SetHostingRequest) -> ModelInfo:
        return self._present(await self._control.lifecycle.place(name, body.devices))

    async def unload(self, name: str, mode: RemoveMode, keep_host: bool) -> Unloaded:
        return await self._control.cache_control.unload(name, mode, keep_host=keep_host)

    async def cache(self) -> CacheInfo:
        return await self._control.cache_control.info()

    async def pin(self, name: str, body: SetCachedRequest) -> CachedModel:
        return await self._control.cache_control.set_pinned(name, body.is_pinned)

    async def drop_snapshot(self, name: str) -> CachedModel:
        return await self._control.cache_control.drop(name)

    async def warm(self, name: str) -> CachedModel:
        return await self._control.cache_control.warm(name)

    def _present(self, row: ModelRow) -> ModelInfo:
        return model_info(row, self._control.fleet.availability(row.spec.name).state)

    # Devices.

    async def set_role(self, device: int, body: SetDeviceRequest) -> DeviceInfo:
        self._control.workers.set_role(device, None if body.role == "auto" else Role(body.role))
        return self._control.devices()[device]

    async def drain(self, device: int) -> DeviceInfo:
        await self._control.workers.drain(device)
        return self._control.devices()[device]

    async def undrain(self, device: int) -> DeviceInfo:
        self._control.workers.undrain(device)
        return self._control.devices()[device]

    async def park(self, device: int) -> DeviceInfo:
        await self._control.lifecycle.parking.park(device)
        return self._control.devices()[device]

    async def wake(self, device: int) -> DeviceInfo:
        self._control.lifecycle.parking.wake(device)
        return self._control.devices()[device]

    async def operate(self, device: int, body: OperateRequest) -> dict[str, Any]:
        return await self._control.operate(device, body.operation, body.arguments)

    async def check(self) -> list[object]:
        return await self._control.check_integrity()

    # The configuration and the machine.

    async def config(self) -> ConfigInfo:
        return self._control.configuration.info()

    async def config_diff(self, body: DiffRequest) -> DiffInfo:
        return await self._control.configuration.diff(body.text, body.name)

    async def reload(self) -> ReloadInfo:
        return await self._control.reloader.reload()

    async def machine(self) -> MachineInfo:
        # In a thread, because a network disk may not answer.
        return await asyncio.to_thread(_machine, self._control.configuration)

    # The present state.

    async def status(self) -> Status:
        return await self._control.status()

    async def ps(self) -> Response:
        return _json(await top_view.ps(self._control))

    async def top(
        self,
        turns_after: int,
        events_after: int | None,
        turns: int,
        events: int,
        requests: int,
        minutes: bool,
    ) -> Response:
        limits = top_view.TopLimits(turns_after, events_after, turns, events, requests, minutes)
        return _json(await top_view.top(self._control, limits))

    async def turns(self, after: int, limit: int) -> Response:
        ended = self._control.dispatcher.accounts.turns.after(after, limit)
        return _json(msgspec.json.encode(ended))

    async def cancel(self, request_id: str) -> CancelledRequest:
        ended = self._control.dispatcher.cancel(request_id, "cancelled by the operator")
        for request in ended:
            self._control.history.record_event(
                "info", "request_cancelled", request.model, f"{request.request_id}, by hand"
            )
        return CancelledRequest(
            request_id=ended[0].request_id,
            model=ended[0].model,
            num_output_tokens=sum(len(request.token_times_s) for request in ended),
            num_requests=len(ended),
        )

    async def why(self, name: str) -> Why:
        return await self._control.explainer.why(name)

    async def metrics(self) -> Response:
        return Response(await self._exporter.text(), media_type=CONTENT_TYPE)

    async def logs(
        self, request: Request, lines: int, process: str | None, follow: bool
    ) -> AsyncIterator[str]:
        paths = _log_paths(self._control.settings.paths.log_dir, process)
        return follow_logs(paths, lines, follow=follow, is_gone=request.is_disconnected)

    # The history.

    async def event_log(self) -> Iterator[bytes]:
        return _chunks(self._control.event_log())

    async def requests(self, limit: int) -> AsyncIterator[bytes]:
        await self._control.history.flush()
        return _request_lines(await self._control.history.recent_requests(limit=limit))

    async def past_requests(
        self, model: str | None, since_s: float, limit: int, request_id: str | None
    ) -> Sequence[RequestRecord]:
        await self._control.history.flush()
        return await self._control.history.recent_requests(
            await self._name(model),
            time.time() - since_s,
            limit,
            None if request_id is None else request_id_of(request_id),
        )

    async def events(
        self, after: int | None, limit: int, follow: bool
    ) -> list[Event] | AsyncIterator[bytes]:
        history = self._control.history
        first = after if after is not None else max(0, history.last_event_id - limit)
        if follow:
            return self._event_lines(first)
        return await history.events_after(first, limit)

    async def _event_lines(self, after_id: int) -> AsyncIterator[bytes]:
        history = self._control.history
        while not self._control.stopping:
            for row in await history.events_after(after_id, 1000):
                after_id = row.id
                yield msgspec.json.encode(row) + b"\n"
            await history.wait_event(after_id, _FOLLOW_WAIT_S)
            await asyncio.sleep(0)

    async def history(self, model: str | None, since_s: float) -> list[SpanInfo]:
        spans = Spans(span_s(since_s))
        await self._add_minutes(spans, model, since_s)
        return spans.infos()

    async def history_by_model(self, model: str | None, since_s: float) -> list[ModelSpan]:
        sums = ModelSums(time.time() - since_s, since_s)
        await self._add_minutes(sums, model, since_s)
        return sums.infos()

    async def switches(
        self,
        limit: int,
        model: str | None,
        device: int | None,
        since_s: float | None,
        order: SwitchOrder,
    ) -> list[Switch]:
        await self._control.history.flush()
        return await self._control.history.recent_switches(
            limit,
            model=await self._name(model),
            device=device,
            since=None if since_s is None else time.time() - since_s,
            order=order,
        )

    async def usage(self, since_s: float) -> UsageInfo:
        self._control.dispatcher.accounts.usage.close(FRESH_S)
        history, since = self._control.history, time.time() - since_s
        await history.flush()
        names = {row.id: row.name for row in await self._control.keyring.list(with_revoked=True)}
        uses, devices = await history.usage(since), await history.device_sums(since)
        return usage_info(since, uses, devices, names)

    async def batches(self, limit: int, ended: bool) -> list[BatchInfo]:
        folder = self._control.settings.paths.state_dir / "batches"
        rows = await asyncio.to_thread(read_batches, folder, limit, with_ended=ended)
        return [_batch_info(row, self._control.keyring.names) for row in rows]

    async def _name(self, name: str | None) -> str | None:
        """Return the model's name for an alias; an unknown name may still have a history."""
        row = None if name is None else await self._control.registry.get(name)
        is_counted = name is None or row is None or name not in (row.spec.name, *row.spec.aliases)
        return name if is_counted or row is None else row.spec.name

    async def _add_minutes(
        self, sums: Spans | ModelSums, model: str | None, since_s: float
    ) -> None:
        """Add the minutes of the last ``since_s`` seconds, of one model or of all."""
        model = await self._name(model)
        await self._control.history.flush()
        try:
            async for rows in self._control.history.minutes(time.time() - since_s, model):
                # In a thread, because many rows would delay tokens.
                await asyncio.to_thread(sums.add, rows)
            sums.add(self._control.minutes.under_way(model))
        except ValueError as error:
            raise Failed(
                f"a row of slo_minutes in the state database is damaged: {error}",
                "delete the rows of the table",
            ) from error

    # API keys and the fleet.

    async def api_keys(self, revoked: bool) -> list[KeyInfo]:
        rows = await self._control.keyring.list(with_revoked=revoked)
        return [self._key_info(row) for row in rows]

    async def add_key(self, body: AddKeyRequest) -> NewKey:
        _check_expiry(body.expires_at)
        if bool(body.id) != bool(body.digest):
            raise UsageError("a key of the fleet has an id and a digest", "send both or none")
        keyring, powers = self._control.keyring, _powers(body)
        if body.id:
            row = await keyring.adopt(body.id, body.name, body.digest, powers)
            return NewKey(key=self._key_info(row), text="")
        row, text = await keyring.add(body.name, powers)
        return NewKey(key=self._key_info(row), text=text)

    async def set_key(self, name: str, body: SetKeyRequest) -> KeyInfo:
        _check_expiry(body.expires_at)
        known = await self._control.keyring.find(name)
        return self._key_info(await self._control.keyring.set(name, _changed(known.powers, body)))

    async def rotate_key(self, name: str, body: RotateKeyRequest) -> NewKey:
        row, text = await self._control.keyring.rotate(name, body.grace_s)
        return NewKey(key=self._key_info(row), text=text)

    async def remove_key(self, name: str) -> KeyInfo:
        return self._key_info(await self._control.keyring.revoke(name))

    def _key_info(self, row: KeyRow) -> KeyInfo:
        left = self._control.keyring.left(row)
        facts = {field.name: getattr(row, field.name) for field in dataclasses.fields(KeyFacts)}
        return KeyInfo(
            **facts, **vars(row.powers), requests_left=left.requests, tokens_left=left.tokens
        )

    async def fleet_report(self) -> FleetReport:
        control = self._control
        ready = [device for device in control.devices() if device.state == "ready"]
        rates = [device.bandwidth_bytes_per_s for device in ready]
        rows = await control.registry.list()
        return FleetReport(
            secret=control.membership.secret,
            http_url=control.http_url,
            is_ready=control.state == "ready",
            device_bytes=[device.device_bytes for device in ready],
            bandwidth_bytes_per_s=max(rates, default=0.0),
            cache_free_bytes=max(0, control.cache.budget_bytes - control.cache.used_bytes),
            key_names=control.keyring.names,
            rate_uses=control.keyring.rate_uses,
            models=await fleet_models(rows, control.dispatcher, control.fleet),
        )

    async def charge_keys(self, body: ChargeKeysRequest) -> FleetReport:
        self._control.keyring.charge_elsewhere(body.uses)
        return await self.fleet_report()

    async def set_fleet_secret(self, body: SetFleetRequest) -> FleetReport:
        if body.secret and not is_secret(body.secret):
            raise UsageError("a fleet's secret has 64 hexadecimal digits")
        await self._control.membership.set(body.secret)
        return await self.fleet_report()


def error_body(error: GpupoolError) -> ErrorBody:
    message = error.message.encode(errors="replace").decode()  # may quote a surrogate
    return ErrorBody(code=error.code, message=message, hint=error.hint)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _progress_lines(steps: AsyncIterator[Progress]) -> AsyncIterator[str]:
    try:
        async for line in steps:
            yield line.model_dump_json() + "\n"
    except GpupoolError as error:
        yield Progress(stage="failed", error=error_body(error)).model_dump_json() + "\n"


def _chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a few lines at a time, because the server takes each chunk from a thread."""
    while chunk := b"".join(islice(lines, _LINES_AT_ONCE)):
        yield chunk


async def _request_lines(rows: Sequence[RequestRow]) -> AsyncIterator[bytes]:
    """Yield a few lines at a time, because a long answer would delay tokens on the event loop."""
    for start in range(0, len(rows), _LINES_AT_ONCE):
        chunk = rows[start : start + _LINES_AT_ONCE]
        yield b"".join(_RECORD.dump_json(row) + b"\n" for row in chunk)
        await asyncio.sleep(0)


def _log_paths(log_dir: Path, process: str | None) -> dict[str, Path]:
    paths = {path.stem: path for path in sorted(log_dir.glob("*.log"))}
    if process is None:
        return paths
    if process not in paths:
        raise UsageError(f"no process is named {process!r}", f"there are: {', '.join(paths)}")
    return {process: paths[process]}


def _machine(configuration: Configuration) -> MachineInfo:
    # Imported here, because no other operation needs the probes.
    from gpupoold.doctor.probe_host import folder_facts, limit_facts, memory_facts

    limits = limit_facts()
    return MachineInfo(
        config_path=None if configuration.path is None else str(configuration.path),
        folders=[
            dataclasses.replace(fact, hint=hint_to_write(fact.path))
            for fact in folder_facts(configuration.settings)
        ],
        open_files=limits.open_files,
        processes=limits.processes,
        locked_bytes=limits.locked_bytes,
        address_space_bytes=limits.address_space_bytes,
        memory_limit_bytes=memory_facts().limit_bytes,
    )


def _batch_info(row: BatchRow, names: Mapping[str, str]) -> BatchInfo:
    own = {"key": names.get(row.owner, row.owner), "state": row.status, "reason": row.waits_because}
    shared = {field.name for field in dataclasses.fields(BatchInfo)} - own.keys()
    return BatchInfo(**own | {name: getattr(row, name) for name in shared})


def _powers(body: AddKeyRequest) -> KeyPowers:
    return KeyPowers(
        **{field.name: getattr(body, field.name) for field in dataclasses.fields(KeyPowers)}
    )


def _changed(powers: KeyPowers, body: SetKeyRequest) -> KeyPowers:
    """Return ``powers`` with the values that the body gives; 0 removes a limit."""
    given = body.model_dump(exclude={"all_models"}, exclude_none=True)
    changes = {name: None if value == 0 else value for name, value in given.items()}
    return dataclasses.replace(powers, **({"models": None} if body.all_models else {}) | changes)


def _check_expiry(expires_at: float | None) -> None:
    if expires_at and expires_at <= time.time():
        raise UsageError("the key would have expired already", "give a time in the future")


async def follow_logs(
    paths: dict[str, Path], num_lines: int, *, follow: bool, is_gone: Callable[[], Awaitable[bool]]
) -> AsyncIterator[str]:
    """Yield NDJSON of :class:`LogLine`: the last lines of each log, then new lines."""
    with contextlib.ExitStack() as stack:
        readers = {name: stack.enter_context(LogReader(path)) for name, path in paths.items()}
        for name, reader in readers.items():
            for line in await asyncio.to_thread(reader.tail, num_lines):
                yield _encode(name, line)
        while follow and not await is_gone():
            await asyncio.sleep(_POLL_S)
            for name, reader in readers.items():
                for line in await asyncio.to_thread(reader.new_lines):
                    yield _encode(name, line)


class LogReader:
    """A reader that starts at the end of a log and continues in the next file after a rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tail(self, num_lines: int) -> list[str]:
        """Return the last ``num_lines`` lines before the start of :meth:`new_lines`."""
        end = self._file.tell()
        start = max(0, end - _MAX_TAIL_BYTES)
        self._file.seek(start)
        lines = _lines(self._file.read(end - start))
        if len(lines) < num_lines and start == 0 and not self._has_next():
            with contextlib.suppress(OSError), old_file(self._path, 1).open("rb") as older:
                older.seek(max(0, older.seek(0, os.SEEK_END) - _MAX_TAIL_BYTES))
                lines = _lines(older.read()) + lines
        return lines[len(lines) - num_lines :] if num_lines < len(lines) else lines

    def new_lines(self) -> list[str]:
        """Return the complete lines written since the last call.

        A truncated log starts anew. After a rotation the rest of the old file comes first.
        """
        has_next = self._has_next()  # before the old file is read to its end
        offset = self._file.tell()
        if os.fstat(self._file.fileno()).st_size < offset:
            offset = self._file.seek(0)
        data = self._file.read(_MAX_TAIL_BYTES)
        if has_next and len(data) < _MAX_TAIL_BYTES:
            with contextlib.suppress(FileNotFoundError):  # the next file does not exist yet
                following = self._path.open("rb")
                self._file.close()
                self._file = following
                return _lines(data)
        whole = data.rfind(b"\n") + 1
        self._file.seek(offset + whole)
        return _lines(data[:whole])

    def _has_next(self) -> bool:
        try:
            there, here = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:  # not created yet
            return False
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="replace").splitlines()


def _encode(name: str, line: str) -> str:
    return LogLine(process=name, line=line).model_dump_json() + "\n"
