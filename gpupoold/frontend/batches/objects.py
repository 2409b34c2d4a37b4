"""Objects of OpenAI's API for files and batches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gpupool_state.batches import BatchRow, FileRow

_ENDED_AT = ("completed", "failed", "expired", "cancelled")
_MAX_PAGE_BYTES = 1 << 18


def file_object(row: FileRow) -> dict[str, Any]:
    """Return a file as an object of the API."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.num_bytes,
        "created_at": row.created_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        **({} if row.expires_at is None else {"expires_at": row.expires_at}),
    }


def batch_object(row: BatchRow) -> dict[str, Any]:
    """Return a batch as an object of the API.

    ``status_details``, which OpenAI does not have, says why requests wait.
    """
    ended = {f"{status}_at": row.ended_at if row.status == status else None for status in _ENDED_AT}
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.status,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": row.created_at,
        "in_progress_at": row.in_progress_at,
        "expires_at": row.expires_at,
        "finalizing_at": row.finalizing_at,
        "cancelling_at": row.cancelling_at,
        **ended,
        "request_counts": {
            "total": row.num_requests,
            "completed": row.num_completed,
            "failed": row.num_failed,
        },
        "metadata": row.metadata or None,
        "status_details": (
            {"reason": row.waits_because, "next_try_at": row.next_try_at}
            if row.waits_because
            else None
        ),
    }


def list_object(items: Iterable[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a page of at most ``limit`` items and about ``_MAX_PAGE_BYTES``.

    One item more tells of a further page.
    """
    page: list[dict[str, Any]] = []
    num_bytes, has_more = 0, False
    for item in items:
        has_more = len(page) == limit or num_bytes >= _MAX_PAGE_BYTES
        if has_more:
            break
        page.append(item)
        num_bytes += len(json.dumps(item))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }
