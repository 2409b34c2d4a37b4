"""A panel with a caller's changes: its title is true, and its models fit the box."""

from __future__ import annotations

from dataclasses import replace

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import why_too_large
from gpupoold.sim.scenario import FigurePanel, Overrides
from gpupoold.units import format_duration


def changed_panel(panel: FigurePanel, wanted: Overrides) -> tuple[FigurePanel, list[str]]:
    """Return the panel with the changes, and why dimensions of models were left out.

    The other dimensions take the place of those that exceed a device. Recorded requests keep their
    models.

    Raises:
        UsageError: all dimensions exceed a device, or as for ``FigurePanel.changed``.
    """
    changed = panel.changed(wanted)
    if _load(changed) != _load(panel):
        changed = replace(changed, title=description(changed))
    reasons = {shape: why_too_large(changed.box, shape) for shape in changed.shapes}
    fitting = tuple(shape for shape in changed.shapes if not reasons[shape])
    left_out = [reason for reason in reasons.values() if reason]
    if not fitting:
        raise UsageError(left_out[0], "use groups of GPUs (such as 2x4xH800), or larger GPUs")
    return replace(changed, shapes=fitting), left_out


def description(panel: FigurePanel) -> str:
    """Return the box, the load and unusual targets in words."""
    words = [panel.box.name]
    if panel.box.degrees != (1,):
        words[0] += f" in groups of {' and '.join(map(str, dict.fromkeys(panel.box.degrees)))}"
    if panel.axis == "rps" and len(panel.models) == 1:
        words.append(f"{panel.models[0]} models")
    if panel.axis == "models" and len(panel.rps) == 1:
        words.append(f"{panel.rps[0]:g} rps per model")
    if panel.targets != Targets():
        ttft, tbt = map(format_duration, (panel.targets.ttft_s, panel.targets.tbt_s))
        words.append(f"TTFT {ttft}, TBT {tbt}")
    return ", ".join(words)


def _load(panel: FigurePanel) -> tuple[object, ...]:
    return panel.box, panel.models, panel.rps, panel.targets
