"""The application of the admin API: a handler for each operation, errors as bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from inspect import Parameter, Signature, signature
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

from gpupoold import __version__
from gpupoold.admin.handlers import Handlers, error_body
from gpupoold.api.admin_api import OPERATIONS, Operation
from gpupoold.control.control_plane import ControlPlane
from gpupoold.errors import GpupoolError, UsageError
from gpupoold.metrics.exposition import Exporter
from gpupoold.printable import plain_problem


def build_app(control_plane: ControlPlane, exporter: Exporter) -> FastAPI:
    """Return the application of the admin API for ``control_plane``."""
    app = FastAPI(title="gpupoold", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(GpupoolError, _on_error)
    app.add_exception_handler(UnicodeEncodeError, _on_surrogate)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    add_operations(app, Handlers(control_plane, exporter))
    return app


def add_operations(app: FastAPI, handlers: object) -> None:
    """Add each operation's route, with the method of ``handlers`` that has the operation's name.

    Raises:
        TypeError: an operation has no handler with its parameters, or a handler no operation.
    """
    found = {name for name in vars(type(handlers)) if not name.startswith("_")}
    if found != OPERATIONS.keys():
        raise TypeError(f"operations and handlers differ: {sorted(found ^ OPERATIONS.keys())}")
    for operation in OPERATIONS.values():
        _add(app, operation, getattr(handlers, operation.name))


def _add(app: FastAPI, operation: Operation, handler: Callable[..., Awaitable[Any]]) -> None:
    parameters = operation.parameters
    names, handled = {one.name for one in parameters}, signature(handler).parameters.keys()
    if handled - {"request"} != names:
        raise TypeError(f"{operation.name} and its handler have other parameters")
    if "request" in handled:
        parameters.append(Parameter("request", Parameter.KEYWORD_ONLY, annotation=Request))

    async def endpoint(**arguments: Any) -> Any:
        answer = await handler(**arguments)
        if isinstance(answer, AsyncIterator | Iterator):
            return StreamingResponse(answer, media_type="application/x-ndjson")
        return answer

    endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    path = operation.path
    for one in parameters:
        if one.annotation is str:
            path = path.replace(f"{{{one.name}}}", f"{{{one.name}:path}}")
    app.add_api_route(
        path,
        endpoint,
        methods=[operation.method],
        name=operation.name,
        response_model=None if operation.is_stream else operation.answer,
    )


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GpupoolError)
    return JSONResponse({"error": error_body(error).model_dump()}, status_code=error.http_status)


async def _on_surrogate(request: Request, _: Exception) -> JSONResponse:
    return await _on_error(request, UsageError("a text has half of a surrogate pair"))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(map(str, p['loc'][1:]))}: {plain_problem(p['msg'])}" for p in error.errors()
    ]
    return await _on_error(request, UsageError("; ".join(problems)))
