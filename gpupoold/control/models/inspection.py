"""Inspections of models by vLLM's own classes, in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gpupoold.config.schema import Settings
from gpupoold.control.models.specs import to_load
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.forks import ForkServer
from gpupoold.domain import ModelSpec
from gpupoold.errors import Failed, TimedOut, error_from_code
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_LIMIT_S = 180.0
_MAX_AT_ONCE = 4


class Inspector:
    """Checks a model's options and small files before weights are downloaded or loaded."""

    def __init__(self, settings: Settings, forks: ForkServer) -> None:
        self._settings = settings
        self._forks = forks
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def check(self, spec: ModelSpec, degrees: Iterable[int] = ()) -> dict[int, str]:
        """Check a model for the kind of the configured devices; simulated devices accept all.

        Return the ``degrees`` of groups of GPUs that cannot divide the model, with the reason.

        Raises:
            GpupoolError: the reason why the model cannot be served.
        """
        kinds = {device.kind for device in self._settings.devices} - {"sim"}
        if not kinds:
            return {}
        model, is_emulated = to_load(spec, self._settings), kinds == {"emulated"}
        order = m.Inspect(model, is_emulated, tuple(degrees))
        try:
            async with self._slots:
                answer = await self._answer(order)
        except OSError as error:
            raise Failed(f"{spec.name}: the check could not be started: {error}") from error
        if answer.error_code:
            raise error_from_code(answer.error_code, answer.error_message, answer.error_hint)
        return answer.undivided

    async def _answer(self, order: m.Inspect) -> m.Inspected:
        name = order.model.name
        child: Child[m.Inspected] = await Child.start(
            "inspection",
            "gpupoold.worker.inspection",
            ["--log-level", self._settings.log.level],
            m.Inspected,
            self._settings.paths.log_dir / "inspection.log",
            starter=self._forks.fork,
        )
        try:
            child.channel.send(order)
            async with asyncio.timeout(_LIMIT_S):
                return await child.channel.receive()
        except ChannelClosed:
            raise Failed(
                f"{name}: the process that checked the model ended without an answer",
                "see `gpupool logs`; the checkpoint's files may be damaged",
            ) from None
        except TimeoutError:
            raise TimedOut(f"{name}: not checked within {_LIMIT_S:g} s", "try again") from None
        finally:
            child.kill()
            await child.ended()
