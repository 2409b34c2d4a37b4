"""Calls of the admin API about the daemon's fleet."""

from __future__ import annotations

from pydantic import TypeAdapter

from gpupoold.access.rate_use import RateUse
from gpupoold.api.calls import AdminCalls
from gpupoold.api.schemas_fleet import ChargeKeysRequest, FleetReport, SetFleetRequest

_REPORT = TypeAdapter(FleetReport)


class NodeCalls(AdminCalls):
    """The daemon as a node; errors as of :class:`gpupoold.api.client.AdminClient`."""

    def fleet_report(self) -> FleetReport:
        """Return what the fleet needs to know of the daemon."""
        return self._call(_REPORT, "GET", "/fleet")

    def charge_keys(self, uses: dict[str, RateUse]) -> FleetReport:
        """Charge use of API keys on other nodes to the rates of the daemon's keys."""
        return self._call(_REPORT, "POST", "/fleet/charges", body=ChargeKeysRequest(uses=uses))

    def set_fleet_secret(self, secret: str) -> FleetReport:
        """Let the daemon take requests of a fleet's entrance; an empty secret ends that.

        Raises:
            UsageError, Failed: the secret has another form, or cannot be stored.
        """
        return self._call(_REPORT, "PUT", "/fleet", body=SetFleetRequest(secret=secret))
