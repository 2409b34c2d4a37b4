"""One screen as plain text, for ``gpupool top -1`` and without a terminal."""

from __future__ import annotations

from datetime import tzinfo

from gpupool_tui.compose import compose
from gpupool_tui.glyphs import ASCII, UNICODE
from gpupool_tui.layout import wishes
from gpupool_tui.picture import Picture
from gpupool_tui.text import plain
from gpupool_tui.view import View, first_zoom_s
from gpupoold.api.client import AdminClient

_NUM_TURNS = 2000
_NUM_REQUESTS = 20
_NUM_EVENTS = 10


def screen_text(picture: Picture, width: int, *, is_ascii: bool, zone: tzinfo | None = None) -> str:
    """Return all panels as text of any height, without the hints of keys."""
    zoom_s = first_zoom_s(picture.turns_s())
    view = View(ASCII if is_ascii else UNICODE, zone, zoom_s=zoom_s, interval_s=0.0)
    rows = len(picture.devices), len(picture.models), len(picture.requests), len(picture.events)
    height = 2 + sum(one.most for one in wishes(*rows).values())
    lines = compose(picture, view, width, height).lines[:-1]
    texts = [plain(line) for line in lines]
    while texts and not texts[-1]:
        texts.pop()
    return "\n".join(texts)


def ask_once(client: AdminClient) -> Picture:
    """The picture at this moment."""
    picture = Picture()
    picture.add(client.top(turns=_NUM_TURNS, requests=_NUM_REQUESTS, events=_NUM_EVENTS))
    return picture
