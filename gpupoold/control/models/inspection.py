"""Inspections of checkpoints and models in processes of their own.

A hostile file can only end, fill or delay such a process, which is killed beyond a limit of time or
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from gpupoold.checkpoints.adapter_check import AdapterFacts
from gpupoold.checkpoints.files import fingerprint
from gpupoold.checkpoints.parsers import FoundParsers
from gpupoold.checkpoints.survey import CheckpointSurvey, decoded
from gpupoold.config.schema import Settings
from gpupoold.control.models.specs import to_load
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.forks import ForkServer
from gpupoold.domain import ModelSpec
from gpupoold.errors import Failed, Refused, TimedOut, error_from_code
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_LIMIT_S = 180.0
_MAX_MEMORY_BYTES = 8 << 30
"""Limit beyond the memory that the process shares with the fork server."""
_LOOK_S = 0.25
_MAX_AT_ONCE = 4


class Inspector:
    """Reads and checks the files of models before weights are downloaded or loaded."""

    def __init__(self, settings: Settings, forks: ForkServer) -> None:
        self._settings = settings
        self._forks = forks
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._checked: dict[str, object] = {}

    async def survey(
        self, path: Path, dtype: str, engine: Mapping[str, str], *, may_be_remote: bool = False
    ) -> CheckpointSurvey:
        """Read and check the files of a checkpoint.

        Raises:
            GpupoolError: the reason why the checkpoint is refused, or why it was not read.
        """
        security = self._settings.security
        order = m.Survey(
            str(path),
            dtype,
            dict(engine),
            security.allow_pickle,
            security.allow_remote_code,
            may_be_remote,
        )
        return decoded((await self._answer(str(path), order)).result, CheckpointSurvey)

    async def survey_adapter(self, path: Path, base: Path) -> AdapterFacts:
        """Read and check the files of an adapter for the checkpoint ``base``.

        Raises:
            GpupoolError: the reason why the adapter is refused, or why it was not read.
        """
        order = m.SurveyAdapter(str(path), str(base), self._settings.security.allow_pickle)
        return decoded((await self._answer(str(path), order)).result, AdapterFacts)

    async def parsers(self, spec: ModelSpec) -> FoundParsers:
        """Return the parsers and the chat template of a model.

        Raises:
            GpupoolError: the files could not be read in time.
        """
        order = m.FindParsers(spec.path, spec.engine)
        return decoded((await self._answer(spec.name, order)).result, FoundParsers)

    async def check(self, spec: ModelSpec, degrees: Iterable[int] = ()) -> dict[int, str]:
        """Check a model by vLLM's classes for the kind of the configured devices.

        Simulated devices accept all models with a usable chat template. Return the ``degrees`` of
        groups of GPUs that cannot divide the model, with the reason.

        Raises:
            GpupoolError: the reason why the model cannot be served.
        """
        has_engines = any(device.kind != "sim" for device in self._settings.devices)
        return await self._inspect(spec, degrees, only_chat=not has_engines)

    async def check_chat(self, spec: ModelSpec) -> None:
        """Check a model's files, tokenizer and chat template, unless checked as they are now.

        Raises:
            GpupoolError: the reason why conversations cannot be rendered.
        """
        now = await asyncio.to_thread(_chat_of, spec)
        if now is None or self._checked.get(spec.name) != now:
            await self._inspect(spec, only_chat=True)

    async def _inspect(
        self, spec: ModelSpec, degrees: Iterable[int] = (), *, only_chat: bool
    ) -> dict[int, str]:
        kinds = {device.kind for device in self._settings.devices} - {"sim"}
        model, is_emulated = to_load(spec, self._settings), kinds <= {"emulated"}
        before = await asyncio.to_thread(_chat_of, spec)
        order = m.Inspect(model, is_emulated, tuple(degrees), only_chat)
        answer = await self._answer(spec.name, order)
        self._checked[spec.name] = before
        return answer.undivided

    async def _answer(self, name: str, order: m.ToInspection) -> m.Inspected:
        try:
            async with self._slots:
                answer = await self._ask(name, order)
        except OSError as error:
            raise Failed(f"{name}: the check could not be started: {error}") from error
        if answer.error_code:
            raise error_from_code(answer.error_code, answer.error_message, answer.error_hint)
        return answer

    async def _ask(self, name: str, order: m.ToInspection) -> m.Inspected:
        child: Child[m.Inspected] = await Child.start(
            "inspection",
            "gpupoold.worker.inspection",
            ["--log-level", self._settings.log.level],
            m.Inspected,
            self._settings.paths.log_dir / "inspection.log",
            starter=self._forks.fork,
        )
        watching = asyncio.create_task(_end_beyond(child, _MAX_MEMORY_BYTES))
        try:
            child.channel.send(order)
            async with asyncio.timeout(_LIMIT_S):
                return await child.channel.receive()
        except ChannelClosed:
            if watching.done():
                raise Refused(
                    f"{name}: the check takes more than {format_bytes(_MAX_MEMORY_BYTES)} of "
                    "memory",
                    "use the original checkpoint; numbers in its config.json may be too large",
                ) from None
            raise Failed(
                f"{name}: the process that checked the model ended without an answer",
                "see `gpupool logs`; the checkpoint's files may be damaged",
            ) from None
        except TimeoutError:
            raise TimedOut(f"{name}: not checked within {_LIMIT_S:g} s", "try again") from None
        finally:
            watching.cancel()
            child.kill()
            await child.ended()


def _chat_of(spec: ModelSpec) -> object:
    """Return what the rendering of conversations depends on; None if the files cannot be read."""
    try:
        files = fingerprint(Path(spec.path))
    except (OSError, Refused):
        return None
    return files, sorted(spec.engine.items())


async def _end_beyond(child: Child[m.Inspected], num_bytes: int) -> None:
    """Kill a child when it has this much more memory than at first; return afterwards.

    Other limits do not fit: a GPU's libraries reserve more address space than a machine has memory.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(child.pid)
        first_bytes = process.memory_info().rss
        while process.memory_info().rss - first_bytes <= num_bytes:
            await asyncio.sleep(_LOOK_S)
        child.kill()
        return
    await asyncio.Event().wait()  # the process has ended by itself
