"""Reasons of failures without details of the server."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.frontend.errors import fit_for_clients, for_clients
from gpupoold.wire.messages import AdmissionAnswer, ModelList, Ping, RequestsFailed, ServedModel

SECRET = "/srv/models/bad"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("there are no weights in /srv/models/bad", "there are no weights in <path>"),
        ("weights with `/srv/my models/bad` (1)", "weights with `<path>` (1)"),
        ("[Errno 2] No such file: '/srv/a b/c.json'", "[Errno 2] No such file: '<path>'"),
        ("error:/tmp/t/x.safetensors, and more", "error:<path>, and more"),
        ("see ~/models/x or file:///srv/x", "see <path> or <path>"),
        ('File "/usr/lib/python3/x.py", line 4', 'File "<path>", line 4'),
        ("path=/srv;next", "path=<path>;next"),
        ("connect to tcp://10.1.2.3:29500 failed", "connect to <address> failed"),
        ("no answer of 10.1.2.3:29500", "no answer of <address>"),
        ("<function f at 0x7f00aa>", "<function f>"),
        ("org/name and 12 tokens/s or 1/256", "org/name and 12 tokens/s or 1/256"),
        ("GET /v1/models lists them", "GET /v1/models lists them"),
        ("see https://huggingface.co/org/name", "see https://huggingface.co/org/name"),
        ("vLLM 0.32.0 says <path>", "vLLM 0.32.0 says <path>"),
    ],
)
def test_paths_and_addresses_are_replaced(reason: str, shown: str) -> None:
    assert for_clients(reason) == shown


@pytest.mark.parametrize(
    "message",
    [
        AdmissionAnswer("m", "1", 503, f"no file {SECRET}"),
        RequestsFailed("m", ["1"], f"m could not be warmed: no file {SECRET}"),
        ModelList(
            [ServedModel(name="m", aliases=(), state="failed", created_at=0, reason=SECRET)], True
        ),
    ],
)
def test_every_message_with_a_text_for_clients(message: Any) -> None:
    assert SECRET not in repr(fit_for_clients(message))
    assert "<path>" in repr(fit_for_clients(message))


def test_other_messages_are_as_they_were() -> None:
    ping = Ping()
    assert fit_for_clients(ping) is ping
