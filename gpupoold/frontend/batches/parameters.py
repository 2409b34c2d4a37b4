"""Parameters of the routes of files and batches: pages, and times of expiry."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import FormData

from gpupool_state.batches import Order
from gpupoold.frontend.errors import bad_request
from gpupoold.frontend.mounts import Scope

# A page has no more rows, whatever the limit; clients ask for the next page.
_MAX_ROWS = 1000
_MIN_KEPT_S, _MAX_KEPT_S = 3600, 2_592_000
_ORDERS: dict[str, Order] = {"asc": "asc", "desc": "desc"}


class ExpiresAfter(msgspec.Struct):
    """When a file expires: ``seconds`` after the creation, the only anchor that OpenAI has."""

    anchor: str
    seconds: int

    def check(self, param: str) -> None:
        """Check the values.

        Raises:
            ApiError: 400.
        """
        if self.anchor != "created_at":
            raise bad_request("The anchor of an expiry is `created_at`.", f"{param}.anchor")
        if not _MIN_KEPT_S <= self.seconds <= _MAX_KEPT_S:
            text = f"A file expires after {_MIN_KEPT_S:,} to {_MAX_KEPT_S:,} seconds."
            raise bad_request(text, f"{param}.seconds")


def expiry_of_form(form: FormData) -> ExpiresAfter | None:
    """Return the fields ``expires_after[...]`` of a form, None without any.

    Raises:
        ApiError: 400.
    """
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    is_number = isinstance(seconds, str) and len(seconds) < 10 and seconds.isdecimal()
    found = ExpiresAfter(str(anchor), int(str(seconds)) if is_number else 0)
    found.check("expires_after")
    return found


class Page(NamedTuple):
    """A part of a list; ``purpose`` None: of any purpose."""

    limit: int
    after: str | None
    order: Order
    purpose: str | None

    @property
    def num_rows(self) -> int:
        """The rows to read: one more than the page has, which tells of a further page."""
        return self.limit + 1


def read_page(scope: Scope, *, max_limit: int, default: int) -> Page:
    """Return the parameters of a list.

    Raises:
        ApiError: 400.
    """
    try:
        found = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16)
        limit = int(found.get("limit", [str(default)])[-1][:10])
    except ValueError:
        limit = 0
        found = {}
    if not 1 <= limit <= max_limit:
        raise bad_request(f"`limit` is a number from 1 to {max_limit:,}.", param="limit")
    order = _ORDERS.get(found.get("order", ["desc"])[-1])
    if order is None:
        raise bad_request("`order` is asc or desc.", param="order")
    after, purpose = found.get("after", [None])[-1], found.get("purpose", [None])[-1]
    return Page(min(limit, _MAX_ROWS), after, order, purpose)
