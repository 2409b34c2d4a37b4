"""Which groups of GPUs can divide which models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpupoold.checkpoints.check import read_json
from gpupoold.checkpoints.division import why_checkpoint_undivided
from gpupoold.checkpoints.layout import CONFIG_FILE
from gpupoold.config.schema import Settings
from gpupoold.control.models.inspection import Inspector
from gpupoold.domain import ModelSpec
from gpupoold.errors import Refused


@dataclass(frozen=True, slots=True)
class _Judged:
    """The degrees that cannot divide a model of this checkpoint and these options, and why."""

    path: str
    engine: dict[str, str]
    reasons: dict[int, str] = field(default_factory=dict)


class Divisions:
    """The devices that cannot host a model, because their GPUs cannot share the model equally.

    The dimensions in ``config.json`` decide first, then vLLM: by an inspection before the model is
    added, or by the refusal of a load. What vLLM said is forgotten at a restart.
    """

    def __init__(self, settings: Settings, inspector: Inspector) -> None:
        self._degrees = [device.num_gpus for device in settings.devices]
        self._inspector = inspector
        self._judged: dict[str, _Judged] = {}

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

    def note(self, spec: ModelSpec, device: int, reason: str) -> bool:
        """Record that a group's worker refused a model; no effect for single GPUs.

        Return whether another device may still host the model.
        """
        if self._degrees[device] == 1:
            return False
        self._reasons(spec)[self._degrees[device]] = reason
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
        reasons = self._reasons(spec)
        degrees = set(self._degrees) - {1}
        reasons |= await self._inspector.check(spec, sorted(degrees.difference(reasons)))
        self.require_one(spec)

    def _reasons(self, spec: ModelSpec) -> dict[int, str]:
        judged = self._judged.get(spec.name)
        if judged is None or (judged.path, judged.engine) != (spec.path, spec.engine):
            judged = self._judged[spec.name] = self._judge(spec)
        return judged.reasons

    def _judge(self, spec: ModelSpec) -> _Judged:
        """Read the checkpoint's dimensions; nothing is known of a file that cannot be read."""
        judged = _Judged(spec.path, dict(spec.engine))
        degrees = set(self._degrees) - {1}
        try:
            config = read_json(Path(spec.path) / CONFIG_FILE) if degrees else {}
        except Refused:
            return judged
        reasons = {degree: why_checkpoint_undivided(config, degree) for degree in degrees}
        judged.reasons.update({degree: reason for degree, reason in reasons.items() if reason})
        return judged
