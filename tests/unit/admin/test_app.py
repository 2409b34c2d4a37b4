"""The handlers of the admin API against the table of operations."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from gpupoold.admin.app import add_operations
from gpupoold.admin.handlers import Handlers
from gpupoold.api.admin_api import OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_handler_takes_what_the_operation_declares(name: str) -> None:
    hints = get_type_hints(getattr(Handlers, name))
    for one in OPERATIONS[name].parameters:
        declared = get_type_hints(_with(one.annotation))["value"]
        assert hints[one.name] == declared, one.name


def _with(annotation: Any) -> Any:
    """Return a class whose hints have the annotation without its bounds."""
    return type("Holder", (), {"__annotations__": {"value": annotation}})


def test_each_operation_has_a_route() -> None:
    app = FastAPI()
    add_operations(app, Handlers(None, None))  # type: ignore[arg-type]
    routes = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert routes == {(one.method, one.path) for one in OPERATIONS.values()}


def test_a_missing_handler() -> None:
    class Fewer(Handlers):
        pass

    with pytest.raises(TypeError, match="add_key"):
        add_operations(FastAPI(), Fewer(None, None))  # type: ignore[arg-type]


def test_a_handler_of_other_parameters() -> None:
    class Other:
        pass

    for name in OPERATIONS:
        setattr(Other, name, getattr(Handlers, name))

    async def status(self: Other, more: str) -> None: ...

    Other.status = status  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="status and its handler"):
        add_operations(FastAPI(), Other())
