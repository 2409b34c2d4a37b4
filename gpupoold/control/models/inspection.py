"""Inspections of checkpoints and models in processes of their own, and what the answers mean.

A hostile file can only end, fill or delay such a process, which is killed beyond a limit of time or
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gpupool_state import KnownDivisions
from gpupoold.checkpoints.adapter_check import AdapterFacts
from gpupoold.checkpoints.files import fingerprint, read_json
from gpupoold.checkpoints.layout import CONFIG_FILE
from gpupoold.checkpoints.parsers import FoundParsers
from gpupoold.checkpoints.survey import (
    CheckpointSurvey,
    decoded,
    drafter_of,
    why_checkpoint_undivided,
)
from gpupoold.config.schema import Settings
from gpupoold.control.models.descriptions import to_load
from gpupoold.control.processes.child import Child, ForkServer
from gpupoold.domain import ModelSpec
from gpupoold.engine_versions import installed_version
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

        Raises GpupoolError: the reason why the checkpoint is refused, or why it was not read.
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

        Raises GpupoolError: the reason why the adapter is refused, or why it was not read.
        """
        order = m.SurveyAdapter(str(path), str(base), self._settings.security.allow_pickle)
        return decoded((await self._answer(str(path), order)).result, AdapterFacts)

    async def parsers(self, spec: ModelSpec) -> FoundParsers:
        """Return the parsers and the chat template of a model.

        Raises GpupoolError: the files could not be read in time.
        """
        order = m.FindParsers(spec.path, spec.engine)
        return decoded((await self._answer(spec.name, order)).result, FoundParsers)

    async def check(self, spec: ModelSpec, degrees: Iterable[int] = ()) -> dict[int, str]:
        """Check a model by vLLM's classes for the kind of the configured devices.

        Simulated devices accept all models with a usable chat template. Return the ``degrees`` of
        groups of GPUs that cannot divide the model, with the reason.

        Raises GpupoolError: the reason why the model cannot be served.
        """
        has_engines = any(device.kind != "sim" for device in self._settings.devices)
        return await self._inspect(spec, degrees, only_chat=not has_engines)

    async def check_chat(self, spec: ModelSpec) -> None:
        """Check a model's files, tokenizer and chat template, unless checked as they are now.

        Raises GpupoolError: the reason why conversations cannot be rendered.
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


@dataclass(frozen=True, slots=True)
class _Judged:
    """The degrees that cannot divide a model of this checkpoint and these options, and why.

    ``by_vllm`` are the degrees whose reasons are vLLM's.
    """

    path: str
    engine: dict[str, str]
    reasons: dict[int, str] = field(default_factory=dict)
    by_vllm: set[int] = field(default_factory=set)

    def add(self, reasons_of_vllm: Mapping[int, str]) -> None:
        self.reasons.update(reasons_of_vllm)
        self.by_vllm.update(reasons_of_vllm)


class Divisions:
    """The devices that cannot host a model, because their GPUs cannot share the model equally.

    The dimensions in ``config.json`` decide first, of the model and of its drafter; then vLLM: by
    an inspection before the model is added, or by the refusal of a load. The registry keeps what
    this version of vLLM said.
    """

    def __init__(self, settings: Settings, inspector: Inspector, known: KnownDivisions) -> None:
        self._degrees = [device.num_gpus for device in settings.devices]
        self._inspector = inspector
        self._judged: dict[str, _Judged] = {}
        self._known = known
        self._engine_version = installed_version() or ""
        self._earlier: dict[str, dict[int, str]] = {}

    async def restore(self) -> None:
        """Recall what vLLM said in earlier lives of the daemon."""
        self._earlier = await self._known.of_version(self._engine_version)

    def said(self, spec: ModelSpec) -> dict[int, str]:
        """Return what vLLM said of a model with these options, by degree."""
        judged = self._judgement(spec)
        return {degree: judged.reasons[degree] for degree in judged.by_vllm}

    async def keep(self, spec: ModelSpec, said: Mapping[int, str] | None = None) -> None:
        """Store what vLLM said of a registered model with these options, now or earlier."""
        self._judgement(spec).add(said or {})
        await self._known.replace(spec.name, self._engine_version, self.said(spec))

    def why_not(self, spec: ModelSpec, device: int) -> str:
        """Return why a device cannot divide a model; empty if the device can."""
        degree = self._degrees[device]
        return "" if degree == 1 else self._judgement(spec).reasons.get(degree, "")

    def lacking(self, spec: ModelSpec) -> frozenset[int]:
        """Return the devices that cannot divide a model."""
        numbers = range(len(self._degrees))
        return frozenset(number for number in numbers if self.why_not(spec, number))

    def require_one(self, spec: ModelSpec) -> None:
        """Check that a device can host the model, or each device that was chosen by hand.

        Raises Refused: the reasons of the devices.
        """
        lacking = self.lacking(spec)
        numbers = spec.devices or range(len(self._degrees))
        if spec.devices and lacking.intersection(numbers):
            raise self.refusal(spec, sorted(lacking.intersection(numbers)))
        if len(lacking) == len(self._degrees):
            raise self.refusal(spec, numbers)

    def refusal(self, spec: ModelSpec, numbers: Iterable[int]) -> Refused:
        """Return the error for devices that cannot divide a model."""
        reasons = {self._degrees[number]: self.why_not(spec, number) for number in numbers}
        texts = [f"{degree} GPUs: {reason}" for degree, reason in sorted(reasons.items())]
        return Refused(
            f"{spec.name}: the GPUs of a group cannot share the model equally ({'; '.join(texts)})",
            "use a single GPU, or a group of another number of GPUs",
        )

    async def note(self, spec: ModelSpec, device: int, reason: str) -> bool:
        """Record that a group's worker refused a model; no effect for single GPUs.

        Return whether another device may still host the model.
        """
        if self._degrees[device] == 1:
            return False
        self._judgement(spec).add({self._degrees[device]: reason})
        await self.keep(spec)
        numbers = spec.devices or range(len(self._degrees))
        return not self.lacking(spec).issuperset(numbers)

    async def look(self, spec: ModelSpec) -> None:
        """Read a model's dimensions again.

        Raises Refused: as of :meth:`require_one`.
        """
        self._judged[spec.name] = await asyncio.to_thread(self._judge, spec)
        self.require_one(spec)

    async def check(self, spec: ModelSpec) -> None:
        """Check a model's options and small files for the configured devices.

        Raises:
            GpupoolError: the model cannot be served.
            Refused: as of :meth:`require_one`.
        """
        judged = self._judgement(spec)
        degrees = set(self._degrees) - {1}
        judged.add(await self._inspector.check(spec, sorted(degrees.difference(judged.reasons))))
        self.require_one(spec)

    def _judgement(self, spec: ModelSpec) -> _Judged:
        judged = self._judged.get(spec.name)
        if judged is None or (judged.path, judged.engine) != (spec.path, spec.engine):
            judged = self._judged[spec.name] = self._judge(spec)
            judged.add(self._earlier.pop(spec.name, {}))
        return judged

    def _judge(self, spec: ModelSpec) -> _Judged:
        """Read the dimensions of the checkpoint and of the drafter's."""
        judged = _Judged(spec.path, dict(spec.engine))
        degrees = set(self._degrees) - {1}
        _, drafter = drafter_of(spec.engine)
        folders = {"": Path(spec.path), "the drafter: ": drafter}
        for whose, folder in folders.items() if degrees else ():
            config = {} if folder is None else _dimensions(folder)
            for degree in degrees.difference(judged.reasons):
                if reason := why_checkpoint_undivided(config, degree):
                    judged.reasons[degree] = f"{whose}{reason}"
        return judged


def _dimensions(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; empty if the file cannot be read."""
    try:
        return read_json(folder / CONFIG_FILE)
    except Refused:
        return {}
