"""Replacing, unmounting and draining of model APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gpupoold.frontend.mounts import Mounts
from gpupoold.wire.messages import RequestsFailed, StepOutputs
from tests.unit.frontend.asgi import Answer, EchoApi, request

OUTPUTS = StepOutputs(model="m", at_s=0.0, frames=[], progress=[])


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario()

    asyncio.run(whole())


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0.001)


def start_request(mounts: Mounts) -> asyncio.Task[Answer]:
    mount = mounts.get("m")
    assert mount is not None

    async def app(scope: object, receive: object, send: object) -> None:
        await mounts.serve(mount, scope, receive, send)  # type: ignore[arg-type]

    return asyncio.create_task(request(app, "POST", "/"))


def test_replaced_api_finishes_what_it_began() -> None:
    async def scenario() -> None:
        mounts, old, new = Mounts(), EchoApi("old"), EchoApi("new")
        mounts.mount("m", old)
        old.gate.clear()
        answer = start_request(mounts)
        await settle()
        mounts.mount("m", new)
        mounts.deliver(OUTPUTS)
        mounts.fail(RequestsFailed(model="m", request_ids=["r"], message="why"))
        assert (old.pushed, new.pushed) == ([OUTPUTS], [OUTPUTS])
        assert old.failed == new.failed == [(["r"], "why")]
        old.gate.set()
        assert (await answer).body == b"old:"
        await settle()
        assert old.closed
        mounts.deliver(OUTPUTS)
        assert (len(old.pushed), len(new.pushed)) == (1, 2)
        assert old.stopped_because == ""

    run(scenario)


def test_unmounted_api_is_stopped_then_closed() -> None:
    async def scenario() -> None:
        mounts, api = Mounts(), EchoApi("api")
        mounts.mount("m", api)
        api.gate.clear()
        answer = start_request(mounts)
        await settle()
        mounts.unmount("m", "gone")
        assert mounts.get("m") is None
        assert (api.stopped_because, api.closed) == ("gone", False)
        api.gate.set()
        await answer
        await settle()
        assert api.closed

    run(scenario)


def test_idle_api_is_closed_at_once_and_unknown_names_are_ignored() -> None:
    async def scenario() -> None:
        mounts, api = Mounts(), EchoApi("api")
        mounts.mount("m", api)
        mounts.unmount("m", "gone")
        mounts.unmount("m", "gone")
        mounts.deliver(OUTPUTS)
        mounts.fail(RequestsFailed(model="m", request_ids=["r"], message="why"))
        await settle()
        assert api.closed
        assert api.pushed == []

    run(scenario)
