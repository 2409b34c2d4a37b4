"""Connections of the public API, with errors in the API's form."""

from __future__ import annotations

from http import HTTPStatus

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
