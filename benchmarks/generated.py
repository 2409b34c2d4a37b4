"""Requests generated from an OpenAPI description by schemathesis, as raw bytes.

Valid requests, and requests with a wrong part, for each part that can be wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed as seeded, settings
from hypothesis.errors import Unsatisfiable

from benchmarks.malformed_requests import MalformedRequest, request_bytes

_MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


def generated(
    description: Mapping[str, Any], examples: int, seed: int, adjust: Callable[[Any], None]
) -> Iterator[MalformedRequest]:
    """For every operation up to ``examples`` good requests and as many bad ones; the same for a
    seed.

    ``adjust`` gets each case before it is made into bytes.
    """
    for found in schemathesis.openapi.from_dict(dict(description)).get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]
        assert operation is not None, f"{found}"
        for mode in _MODES:
            cases: list[Any] = []
            _collect(operation.as_strategy(generation_mode=mode), examples, seed, cases)
            for case in cases:
                adjust(case)
                yield MalformedRequest(operation.label, _as_bytes(case))


def _collect(strategy: Any, examples: int, seed: int, cases: list[Any]) -> None:
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seeded(seed)
    @given(strategy)
    def collect(case: Any) -> None:
        cases.append(case)

    # An operation without parameters cannot have wrong requests.
    with contextlib.suppress(Unsatisfiable):
        collect()


def _as_bytes(case: Any) -> bytes:
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
    body: Any = prepared.body or b""
    headers = {
        name: value if isinstance(value, str) else value.decode("latin-1")
        for name, value in prepared.headers.items()
        if name.lower() not in ("content-length", "content-type", "connection")
    }
    return request_bytes(
        prepared.method or "GET",
        prepared.path_url,
        body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body),
        [*headers.items()],
    )
