"""Ids of requests, as clients, operators and the daemon see them.

A client sees the server's id of its HTTP request, 32 hexadecimal digits, in the header
``x-request-id``, and in the ``id`` of an answer behind a prefix of the API. The engine requests of
an HTTP request have the same id, with a number behind it from the second prompt on, or before it
for the samples of ``n``.
"""

from __future__ import annotations

import re

API_PREFIXES = (
    "chatcmpl-",
    "classify-",
    "cmpl-",
    "embd-",
    "msg_",
    "pool-",
    "pooling-",
    "resp_",
    "score-",
    "tokenize-",
)

_ENGINE_ID = re.compile(r"(?:\d+_)?([0-9a-f]{32})(?:-\d+)?")


def request_id_of(seen: str) -> str:
    """Return the server's id for the ``id`` of an answer, which has a prefix of the API."""
    found = next((prefix for prefix in API_PREFIXES if seen.startswith(prefix)), "")
    return seen.removeprefix(found)


def is_request(request_id: str, seen: str) -> bool:
    """Return whether ``seen`` names this engine request, or the HTTP request that it is part of.

    ``seen`` is an id as in `gpupool ps`, in ``x-request-id`` or in the body of an answer.
    """
    if seen in (request_id, ""):
        return bool(seen)
    asked, engine_id = request_id_of(seen), _ENGINE_ID.fullmatch(request_id)
    return asked == request_id or (engine_id is not None and engine_id[1] == asked)
