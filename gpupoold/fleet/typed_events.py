"""The events of streamed Anthropic messages and OpenAI responses, each with a type."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from gpupoold.fleet.asgi import DATA, Relay

_LAST = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)
# Texts of Anthropic's deltas.
_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_INDICES = ("index", "output_index", "content_index", "summary_index")
# A node that stops, or whose worker has ended for good.
_LOST = frozenset({"internal_error", "overloaded_error"})

# Events with the first mention of an id.
_NAMING = ("response.created", "response.output_item.added")

_Place = tuple[object, ...]
"""Type and indices of an event."""


class TypedRelay(Relay):
    """A relay of events with types.

    Deltas of a continuation are cut by the number of characters that the client has in each place;
    other events are counted by type and place. Random ids of a continuation are replaced by the
    ids that the client has.
    """

    def __init__(self, *, is_responses: bool) -> None:
        """``is_responses``: the events are OpenAI's, else Anthropic's."""
        super().__init__()
        self._is_responses = is_responses
        self._delivered: Counter[_Place] = Counter()
        self._seen: Counter[_Place] = Counter()  # in the continuation
        self._ids: dict[_Place, str] = {}
        self._replaced: dict[bytes, bytes] = {}
        self._next_number = 0
        self._created: object = None

    @property
    def has_begun(self) -> bool:
        return bool(self._delivered)

    def begin_again(self) -> None:
        super().begin_again()
        self._seen.clear()
        self._replaced.clear()

    def ending(self, text: str) -> bytes:
        if self._is_responses:
            number = self._next_number
            error = {"type": "error", "code": "503", "message": text, "param": None}
            return _event({**error, "sequence_number": number})
        return _event({"type": "error", "error": {"type": "overloaded_error", "message": text}})

    def _passed(self, event: bytes) -> bytes:
        _, found, data = event.partition(DATA)
        if not found:
            return event + b"\n\n"
        for new, had in self._replaced.items():
            data = data.replace(new, had)
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        kind = str(fields.get("type"))
        if _kind_of_error(fields) in _LOST:
            self.lost = event + b"\n\n"
            return b""
        if kind in _NAMING and self._keep_ids(fields):
            return self._passed(event)
        self.is_complete |= kind in _LAST
        if not self._cut(fields):
            return b""
        return _event(fields) if self._is_continued else event + b"\n\n"

    def _cut(self, fields: dict[str, Any]) -> bool:
        """Drop the text that the client has from an event; return whether any part is left."""
        place = _place_of(fields)
        holder, key = _text_of(fields)
        text = holder[key] if key else "."  # an event without a text counts as one character
        num_had = max(0, self._delivered[place] - self._seen[place])
        self._seen[place] += len(text)
        self._delivered[place] = max(self._delivered[place], self._seen[place])
        rest = text[num_had:]
        if not rest:
            return False
        if key:
            holder[key] = rest
        if "sequence_number" in fields:
            fields["sequence_number"] = self._next_number
            self._next_number += 1
        if isinstance(response := fields.get("response"), dict):
            self._created = self._created or response.get("created_at")
            response["created_at"] = self._created
        return True

    def _keep_ids(self, fields: dict[str, Any]) -> bool:
        """Note the random ids of an event; return whether any is to be replaced from now on."""
        place, is_new = _place_of(fields), False
        for name in ("response", "item"):
            holder = fields.get(name)
            for key in ("id", "call_id"):
                value = holder.get(key) if isinstance(holder, dict) else None
                if not isinstance(value, str):
                    continue
                had = self._ids.setdefault((*place, name, key), value)
                if had != value:
                    self._replaced[value.encode()] = had.encode()
                    is_new = True
        return is_new


def _event(fields: dict[str, Any]) -> bytes:
    kind = str(fields.get("type")).encode()
    return b"event: %s\ndata: %s\n\n" % (kind, msgspec.json.encode(fields))


def _place_of(fields: dict[str, Any]) -> _Place:
    delta = fields.get("delta")
    kind = delta.get("type") if isinstance(delta, dict) else None
    return (fields.get("type"), kind, *(fields.get(name) for name in _INDICES))


def _text_of(fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the object with the text of a delta and the text's key, empty for other events."""
    delta = fields.get("delta")
    if isinstance(delta, str):
        return fields, "delta"
    if isinstance(delta, dict) and (key := _TEXTS.get(str(delta.get("type")))) in delta:
        return delta, str(key)
    return fields, ""


def _kind_of_error(fields: dict[str, Any]) -> object:
    error = fields.get("error")
    return error.get("type") if fields.get("type") == "error" and isinstance(error, dict) else None
