"""The points of a preset."""

from __future__ import annotations

from gpupoold.sim.presets import preset_panels
from gpupoold.sim.scenario import Overrides, Point

AS_THEY_ARE = Overrides()


def preset_points(name: str, overrides: Overrides = AS_THEY_ARE) -> list[Point]:
    return [point for panel in preset_panels(name) for point in panel.changed(overrides).points()]
