"""The public paths and the methods of each. Pure.

Only these paths are served. The applications behind also register operator endpoints (scaling,
profiling, raw metrics), which stay out of reach.
"""

from __future__ import annotations

import re

from gpupoold.frontend.pooling_bodies import POOLING_PATHS

ROUTED_PATHS = POOLING_PATHS | frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)
"""Paths whose requests name a model in the body."""
# Paths for load balancers and service managers, which have no key; the answers name no model.
OPEN_PATHS = frozenset({"/health", "/ready"})
RESPONSES_PREFIX = "/v1/responses/"
MODELS_PREFIX = "/v1/models/"
OPENAPI_PATH = "/openapi.json"
# For those who open the address in a browser.
WHERE = {
    "gpupool": "many models behind OpenAI's and Anthropic's API, below /v1",
    "models": "/v1/models",
    "description": OPENAPI_PATH,
    "documentation": "docs/api.md",
}
METRICS_PATH = "/metrics"

_READ = ("GET", "HEAD")
_FIXED = {
    **dict.fromkeys(ROUTED_PATHS, ("POST",)),
    **dict.fromkeys(
        (*OPEN_PATHS, "/", "/version", "/v1/models", METRICS_PATH, OPENAPI_PATH), _READ
    ),
}
_PATTERNS = {
    re.compile(pattern, re.DOTALL): methods
    for pattern, methods in {
        r"/v1/models/.+": _READ,
        r"/v1/responses/[^/]+": ("GET",),
        r"/v1/responses/[^/]+/cancel": ("POST",),
    }.items()
}
_BATCH_PATTERNS = {
    re.compile(pattern, re.DOTALL): methods
    for pattern, methods in {
        r"/v1/files": ("GET", "POST"),
        r"/v1/files/[^/]+": ("DELETE", "GET"),
        r"/v1/files/[^/]+/content": ("GET",),
        r"/v1/batches": ("GET", "POST"),
        r"/v1/batches/[^/]+": ("GET",),
        r"/v1/batches/[^/]+/cancel": ("POST",),
    }.items()
}


def methods_of(path: str, *, has_batches: bool) -> tuple[str, ...]:
    """Return the methods of a path, empty for a path that is not served."""
    if path in _FIXED:
        return _FIXED[path]
    patterns = _PATTERNS | _BATCH_PATTERNS if has_batches else _PATTERNS
    return next((methods for one, methods in patterns.items() if one.fullmatch(path)), ())


def is_batch_path(path: str) -> bool:
    """Return whether a served path is of files or batches."""
    return path.startswith(("/v1/files", "/v1/batches"))


def without_slash(path: str) -> str:
    """Return the path that a path with one slash too many at its end means."""
    return path[:-1] if path.endswith("/") and not path.endswith("//") and path != "/" else path
