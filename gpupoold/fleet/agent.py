"""The fleet's agent beside a daemon, which reports, and carries orders out by the admin API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpupoold.access.rates import RateUse
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas_access import AddKeyRequest, FleetReport
from gpupoold.api.schemas_models import AddModelRequest, SetModelRequest
from gpupoold.errors import GpupoolError, NoSuchKey, NoSuchModel, Refused
from gpupoold.fleet.routing import RateGrowth

_logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a controller: its ``epoch`` grows with each start, ``tick`` with each round."""

    epoch: int
    tick: int


@dataclass(frozen=True, slots=True)
class Order:
    """An order to add, remove, warm or change a model, or to add or remove an API key."""

    kind: Literal["add", "remove", "warm", "set", "add-key", "remove-key"]
    model: str
    """Name of the model, or of the API key."""
    request: AddModelRequest | SetModelRequest | AddKeyRequest | None = None
    """The model or key to add, or the change."""

    @property
    def subject(self) -> str:
        """The name of the model, or the key with its name."""
        return f"API key {self.model}" if self.kind.endswith("-key") else self.model


@dataclass(frozen=True, slots=True)
class AgentReport:
    """A daemon's report, or the ``problem`` of asking; and the models of orders under way."""

    report: FleetReport | None
    problem: str = ""
    ongoing: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons of failed orders by model, until the next order for the model."""


class Agent:
    """Reports about a daemon and carries orders out; for an event loop.

    Orders of an earlier controller, and orders delayed by the network, are refused: two halves of a
    divided fleet never both change a daemon.
    """

    MAX_TICKS_LATE = 10

    def __init__(
        self, socket_path: Path, connect: Callable[[Path], AdminClient] | None = None
    ) -> None:
        """``connect`` opens the admin API of the daemon behind ``socket_path``."""
        self._socket_path = socket_path
        self._connect = connect or (lambda path: AdminClient(path, _CALL_TIMEOUT_S))
        self._client: AdminClient | None = None  # of the reports
        self._latest = Moment(0, 0)
        self._ongoing: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, str] = {}
        self._rate_growth = RateGrowth()

    async def join(self, secret: str) -> FleetReport:
        """Give the daemon the fleet's secret; an empty secret ends the membership.

        Raises GpupoolError: the daemon does not answer, or refuses.
        """
        return await asyncio.to_thread(self._join, secret)

    async def report(self, moment: Moment, uses_elsewhere: dict[str, RateUse]) -> AgentReport:
        """Return the state of the daemon, for a controller at this moment.

        The growth of ``uses_elsewhere``, the use of API keys on other nodes, is charged to the
        rates of the daemon's keys.
        """
        self._check(moment)
        ongoing = tuple(self._ongoing)
        due = self._rate_growth.due(moment.epoch, uses_elsewhere)
        try:
            found = await asyncio.to_thread(self._report, due)
        except GpupoolError as error:
            return AgentReport(None, str(error), ongoing, dict(self._failed))
        return AgentReport(found, "", ongoing, dict(self._failed))

    async def carry_out(self, order: Order, moment: Moment) -> None:
        """Begin to carry an order out; later reports have the result.

        Raises Refused: the controller is not the present one, or the model is being changed.
        """
        self._check(moment)
        if order.subject in self._ongoing:
            raise Refused(f"{order.subject} is being changed on this node")
        self._failed.pop(order.subject, None)
        task = asyncio.create_task(self._carry_out(order), name=f"{order.kind} {order.model}")
        self._ongoing[order.subject] = task

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _check(self, moment: Moment) -> None:
        latest = self._latest
        is_old = moment.epoch < latest.epoch or (
            moment.epoch == latest.epoch and moment.tick < latest.tick - self.MAX_TICKS_LATE
        )
        if is_old:
            raise Refused(
                f"an order of round {moment.tick} of controller {moment.epoch} came after round "
                f"{latest.tick} of controller {latest.epoch}"
            )
        self._latest = max(latest, moment, key=lambda moment: (moment.epoch, moment.tick))

    async def _carry_out(self, order: Order) -> None:
        try:
            await asyncio.to_thread(self._do, order)
            _logger.info("%s %s: done", order.kind, order.model)
        except GpupoolError as error:
            _logger.warning("%s %s: %s", order.kind, order.model, error)
            self._failed[order.subject] = str(error)
        except Exception as error:
            _logger.exception("%s %s", order.kind, order.model)
            self._failed[order.subject] = repr(error)
        finally:
            self._ongoing.pop(order.subject, None)

    def _do(self, order: Order) -> None:
        with self._connect(self._socket_path) as client:
            if order.kind == "remove":
                with contextlib.suppress(NoSuchModel):
                    client.remove_model(order.model, "drain")
            elif order.kind == "warm":
                client.warm(order.model)
            elif order.kind == "remove-key":
                with contextlib.suppress(NoSuchKey):
                    client.remove_key(order.model)
            elif isinstance(order.request, AddKeyRequest):
                client.add_key(order.request)
            elif isinstance(order.request, SetModelRequest):
                client.set_model(order.model, order.request)
            else:
                assert order.request is not None
                for _ in client.add_model(order.request):
                    pass

    def _report(self, due: dict[str, RateUse]) -> FleetReport:
        client, self._client = self._client or self._connect(self._socket_path), None
        try:
            found = client.charge_keys(due) if due else client.fleet_report()
        except BaseException:
            client.close()
            raise
        self._client = client
        return found

    def _join(self, secret: str) -> FleetReport:
        with self._connect(self._socket_path) as client:
            return client.set_fleet_secret(secret)
