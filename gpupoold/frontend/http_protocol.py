"""Connections of the public API, with errors in the API's form."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn import Config
from uvicorn.server import ServerState

from gpupoold.frontend.errors import ApiError
from gpupoold.system.http_protocol import BoundedHttp

_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeoutError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "RequestTooLargeError",
}


class PublicHttp(BoundedHttp):
    """A connection of the public API."""

    def refusal(self, status: HTTPStatus, message: str) -> dict[str, object]:
        return ApiError(status.value, _KINDS[status], message).body()

    def move(self, config: Config, state: ServerState) -> None:
        """Let the server of ``config`` and ``state`` have the connection, if it has no request."""
        if self.cycle is None:
            self.connections.discard(self)
            self.config, self.app = config, config.loaded_app
            self.server_state, self.tasks = state, state.tasks
            self.connections = state.connections
            self.connections.add(self)
