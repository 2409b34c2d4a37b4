"""Calls of the client for ``gpupool top`` and the actions of its keys."""

from __future__ import annotations

from urllib.parse import quote

from pydantic import TypeAdapter

from gpupoold.api.calls import AdminCalls, given
from gpupoold.api.schemas_top import CancelledRequest, Top, TurnInfo, Unloaded, UnloadMode

_TOP = TypeAdapter(Top)
_TURNS = TypeAdapter(list[TurnInfo])
_UNLOADED = TypeAdapter(Unloaded)
_CANCELLED = TypeAdapter(CancelledRequest)


class TopCalls(AdminCalls):
    """Part of :class:`gpupoold.api.client.AdminClient`."""

    def top(
        self,
        turns_after: int = 0,
        events_after: int | None = None,
        *,
        minutes: bool = True,
        **limits: int,
    ) -> Top:
        """Return the present state, with the turns and events after these ids.

        ``limits`` are the maximum numbers of ``turns``, ``events`` and ``requests``.
        Without ``minutes`` the models' attainment by minute is left out.
        """
        query = given(
            turns_after=turns_after,
            events_after=events_after,
            minutes=None if minutes else "false",
            **limits,
        )
        return self._call(_TOP, "GET", "/top", query=query)

    def turns(self, after: int = 0, limit: int = 1000) -> list[TurnInfo]:
        """Return the latest ``limit`` turns with ids above ``after``, oldest first."""
        return self._call(_TURNS, "GET", "/turns", query={"after": after, "limit": limit})

    def unload(
        self, name: str, mode: UnloadMode = "refuse", *, keep_host: bool = False
    ) -> Unloaded:
        """Free a model's memory on all devices and on the host; the next request restores the
        model.

        ``mode`` decides about live requests: ``refuse`` changes nothing if there are any, ``drain``
        waits, ``force`` aborts the requests.

        Raises:
            NoSuchModel: there is no such model.
            Refused: the model has live requests and ``mode`` is ``refuse``, or its snapshot is
                pinned.
        """
        query = given(mode=mode, keep_host="true" if keep_host else None)
        path = f"/loaded/{quote(name, safe='/')}"
        return self._call(_UNLOADED, "DELETE", path, query=query, unbounded=True)

    def cancel(self, request_id: str) -> CancelledRequest:
        """End a live request with an error for the client.

        Raises:
            NoSuchRequest: there is no such live request.
        """
        return self._call(_CANCELLED, "DELETE", f"/requests/{quote(request_id, safe='/')}")
