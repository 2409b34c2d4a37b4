"""Lines of a batch's output and error files."""

from __future__ import annotations

import msgspec

from gpupoold.frontend.batches.stored_files import new_id

_encoder = msgspec.json.Encoder()


def result_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an answered request; ``body`` is the answer's JSON."""
    try:
        answer = msgspec.Raw(msgspec.json.format(body, indent=-1))
    except msgspec.DecodeError:
        answer = msgspec.Raw(_encoder.encode(body.decode(errors="replace")))
    response = {"status_code": status, "request_id": request_id, "body": answer}
    return _line(custom_id, response, None)


def expired_line(custom_id: str) -> bytes:
    """Return the line of a request that was not answered within the completion window."""
    message = "This request could not be executed before the completion window expired."
    return _line(custom_id, None, {"code": "batch_expired", "message": message})


def _line(custom_id: str, response: object, error: object) -> bytes:
    fields = {"id": new_id("batch_req_"), "custom_id": custom_id}
    return _encoder.encode(fields | {"response": response, "error": error})
