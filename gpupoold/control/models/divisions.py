"""Which groups of GPUs can divide which models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpupool_state import KnownDivisions
from gpupoold.checkpoints.division import why_checkpoint_undivided
from gpupoold.checkpoints.drafter import drafter_of
from gpupoold.checkpoints.files import read_json
from gpupoold.checkpoints.layout import CONFIG_FILE
from gpupoold.config.schema import Settings
from gpupoold.control.models.inspection import Inspector
from gpupoold.domain import ModelSpec
from gpupoold.engine_versions import installed_version
from gpupoold.errors import Refused


@dataclass(frozen=True, slots=True)
class _Judged:
    """The degrees that cannot divide a model of this checkpoint and these options, and why.

    ``by_vllm`` are the degrees whose reasons are vLLM's.
    """

    path: str
    engine: dict[str, str]
    reasons: dict[int, str] = field(default_factory=dict)
    by_vllm: set[int] = field(default_factory=set)

    def add(self, reasons: Mapping[int, str]) -> None:
        """Add reasons of vLLM."""
        self.reasons.update(reasons)
        self.by_vllm.update(reasons)


class Divisions:
    """The devices that cannot host a model, because their GPUs cannot share the model equally.

    The dimensions in ``config.json`` decide first, of the model and of its drafter; then vLLM: by
    an inspection before the model is added, or by the refusal of a load. The registry keeps what
    this version of vLLM said.
    """

    def __init__(
        self, settings: Settings, inspector: Inspector, known: KnownDivisions | None = None
    ) -> None:
        self._degrees = [device.num_gpus for device in settings.devices]
        self._inspector = inspector
        self._judged: dict[str, _Judged] = {}
        self._known = known
        self._engine_version = installed_version() or ""
        self._earlier: dict[str, dict[int, str]] = {}

    async def restore(self) -> None:
        """Recall what vLLM said in earlier lives of the daemon."""
        if self._known is not None:
            self._earlier = await self._known.of_version(self._engine_version)

    def said(self, spec: ModelSpec) -> dict[int, str]:
        """Return what vLLM said of a model with these options, by degree."""
        judged = self._judgement(spec)
        return {degree: judged.reasons[degree] for degree in judged.by_vllm}

    async def keep(self, spec: ModelSpec, said: Mapping[int, str] | None = None) -> None:
        """Store what vLLM said of a registered model with these options, now or earlier."""
        self._judgement(spec).add(said or {})
        if self._known is not None:
            await self._known.replace(spec.name, self._engine_version, self.said(spec))

    def why_not(self, spec: ModelSpec, device: int) -> str:
        """Return why a device cannot divide a model; empty if the device can."""
        degree = self._degrees[device]
        return "" if degree == 1 else self._reasons(spec).get(degree, "")

    def lacking(self, spec: ModelSpec) -> frozenset[int]:
        """Return the devices that cannot divide a model."""
        numbers = range(len(self._degrees))
        return frozenset(number for number in numbers if self.why_not(spec, number))

    def require_one(self, spec: ModelSpec) -> None:
        """Check that a device can host the model, or each device that was chosen by hand.

        Raises:
            Refused: the reasons of the devices.
        """
        lacking = self.lacking(spec)
        numbers = spec.devices or range(len(self._degrees))
        if spec.devices and lacking.intersection(numbers):
            raise self.refusal(spec, sorted(lacking.intersection(numbers)))
        if len(lacking) == len(self._degrees):
            raise self.refusal(spec, numbers)

    def refusal(self, spec: ModelSpec, numbers: Iterable[int]) -> Refused:
        """Return the error for devices that cannot divide a model."""
        reasons = {self._degrees[one]: self.why_not(spec, one) for one in numbers}
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

        Raises:
            Refused: as of :meth:`require_one`.
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

    def _reasons(self, spec: ModelSpec) -> dict[int, str]:
        return self._judgement(spec).reasons

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
