"""Reasons of failures without details of the server, for clients of the HTTP API.

Reasons come from exceptions in all processes, with paths and addresses of this machine. Operators
read the whole text in ``gpupool events``, ``gpupool ps`` and the logs.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gpupoold.wire.messages import AdmissionAnswer, ModelList, RequestsFailed

_PATH, _ADDRESS = "<path>", "<address>"
_HIDDEN = (
    # Quoted, in which a path may have spaces.
    (re.compile(r"(['\"`])(?:file://)?~?/[^'\"`\n]*\1"), rf"\1{_PATH}\1"),
    (re.compile(r"\bfile://[^\s'\"`<>]*"), _PATH),
    (re.compile(r"\b(?:tcp|ipc|unix|inproc)://[^\s'\"`<>]*"), _ADDRESS),
    (re.compile(r"(?<![\w./~<-])~?/(?!/)[^\s'\"`<>()\[\],;:]+"), _PATH),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.])"), _ADDRESS),
    (re.compile(r" at 0x[0-9a-fA-F]+"), ""),
)
_API_PATH = re.compile(r"/(?:v1|health|ready|version|metrics)(?:/|$)")


def for_clients(text: str) -> str:
    """Return a reason with ``<path>`` and ``<address>`` for those of this machine."""
    for pattern, shown in _HIDDEN:
        text = pattern.sub(lambda found, shown=shown: _shown(found, shown), text)  # type: ignore[misc]
    return text


def _shown(found: re.Match[str], shown: str) -> str:
    return found[0] if _API_PATH.match(found[0]) else found.expand(shown)


def fit_for_clients(message: Any) -> Any:
    """Return a message of the daemon, whose texts for clients name no detail of the server."""
    match message:
        case AdmissionAnswer() | RequestsFailed():
            return msgspec.structs.replace(message, message=for_clients(message.message))
        case ModelList():
            models = [
                msgspec.structs.replace(model, reason=for_clients(model.reason))
                for model in message.models
            ]
            return msgspec.structs.replace(message, models=models)
        case _:
            return message
