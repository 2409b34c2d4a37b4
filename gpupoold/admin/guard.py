"""The admin API lets in whom the kernel names: the caller's process is known per connection."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gpupoold.access.peers import AdminGroups, Peer, Right, peer_of
from gpupoold.admin.models import ErrorBody
from gpupoold.errors import Forbidden

_PEER = "peer"


class PeerProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's HTTP protocol, which puts who is connected into the state of its requests.

    ASGI has no place for credentials of a unix socket; ``state`` is where a server hands
    things to an application.
    """

    app_state: dict[str, Any]

    def connection_made(self, transport: Any) -> None:
        """Ask the kernel who that is."""
        connection = transport.get_extra_info("socket")
        self.app_state = self.app_state | {_PEER: peer_of(connection)}
        super().connection_made(transport)


class Guard:
    """An ASGI application that lets calls through to another if its caller may make them."""

    def __init__(self, app: ASGIApp, groups: AdminGroups) -> None:
        self._app = app
        self._groups = groups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 to whom it is not for, with the reason and what to do about it."""
        try:
            self._check(scope)
        except Forbidden as error:
            body = ErrorBody(code=error.code, message=error.message, hint=error.hint)
            answer = JSONResponse({"error": body.model_dump()}, status_code=error.http_status)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        peer: Peer = scope["state"][_PEER]
        right: Right = self._groups.right_of(peer)
        self._groups.check(peer, right, scope["method"])
