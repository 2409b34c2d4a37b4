"""Experiments by name: figures of the Aegaeon paper, and recorded workloads.

A preset consists of panels. Where a panel has None or no values, the workload's values are used.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import Box
from gpupoold.sim.changes import description
from gpupoold.sim.other_presets import COMPARED, bursts, other_panels
from gpupoold.sim.real_traces import FunctionCalls, RecordedTrace
from gpupoold.sim.scenario import FigurePanel, FixedRequests, PoissonArrivals, Workload
from gpupoold.sim.workloads import SimRequest

_TEN_MINUTES_S = 600.0
# Aegaeon, section 3.1: the service time for which its figure 4 counts active models.
_SERVICE_S = 16.79
# Models for a GPU of 24 GB: section 7.4 of the paper serves 6 and 7 billion parameters there.
_SMALL_SHAPES = ("Yi-1.5-6B", "Qwen2.5-7B", "Llama-2-7B")
# Grouped-query attention: prompts of 100,000 tokens leave KV that fits beside the weights.
_LONG_PROMPT_SHAPES = ("Qwen2.5-7B", "Yi-1.5-9B", "Llama-3.1-8B")

SYNTH_SCENARIOS = (
    "n16_r0.1_in1_out1",
    "n24_r0.1_in1_out1",
    "n40_r0.05_in1_out1",
    "n40_r0.1_in1_out1",
    "n40_r0.1_in2_out1",
    "n40_r0.1_in1_out2",
    "n40_r0.2_in1_out1",
    "n40_r0.3_in1_out1",
    "n16_r0.5_in1_out1",
    "n40_r0.5_in1_out1",
    "n40_r0.5_in2_out1",
    "n40_r0.5_in1_out2",
    "n40_r0.7_in1_out1",
)


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, including groups of presets."""
    return tuple(_presets())


def preset_panels(name: str) -> tuple[FigurePanel, ...]:
    """Return the panels of a preset. Raises UsageError with the nearest name."""
    presets = _presets()
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(presets)}"
        raise UsageError(f"no preset is named {name!r}", hint)
    return presets[name]


def poisson_panel() -> FigurePanel:
    """Return the default panel: figure 11a's workload with few models."""
    panel = replace(
        _fig11a(), name="poisson", policies=("gpupool", "request-level"), models=(40, 70)
    )
    return replace(panel, title=description(panel))


def trace_panel(path: Path) -> FigurePanel:
    """Return the panel for a file of requests; the file is read only by a run."""
    workload = RecordedTrace(str(path.absolute()))
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    policies = ("gpupool", "request-level")
    return FigurePanel(name, f"requests of {path.name}", Box(16, "H800"), workload, policies)


@cache
def _presets() -> Mapping[str, tuple[FigurePanel, ...]]:
    figures, traces, synth = _figures(), _traces(), _synth()
    presets = {panel.name: (panel,) for panel in (*figures, *traces, *synth)}

    def group(*names: str) -> tuple[FigurePanel, ...]:
        return tuple(panel for name in names for panel in presets[name])

    scales = ("", "-strict", "-loose")
    return presets | {
        "aegaeon-fig11": group(*(f"aegaeon-fig11{letter}" for letter in "abc")),
        "aegaeon-fig12": group("aegaeon-fig12-ix2", "aegaeon-fig12-ox2"),
        "aegaeon-fig13": group(*(f"aegaeon-fig13{letter}" for letter in "abc")),
        "aegaeon-fig17-left": group(*(f"aegaeon-fig17-a10{scale}" for scale in scales)),
        "aegaeon-fig17-right": group(*(f"aegaeon-fig17-72b{scale}" for scale in scales)),
        "aegaeon-synth": synth,
        "real-traces": traces,
        "tokenscale-burst": group(*(panel.name for panel in bursts())),
    }


def _figures() -> tuple[FigurePanel, ...]:
    fig11a = _fig11a()
    return (
        replace(
            fig11a,
            name="aegaeon-fig4",
            title="100 models at 0.037 rps: how many are in use",
            policies=("gpupool",),
            models=(100,),
            rps=(0.037,),
            duration_s=3600.0,
            service_s=_SERVICE_S,
        ),
        _fig6(),
        fig11a,
        replace(
            fig11a,
            name="aegaeon-fig11b",
            title="16xH800, 0.5 rps per model",
            models=(8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96),
            rps=(0.5,),
        ),
        replace(
            fig11a,
            name="aegaeon-fig11c",
            title="16xH800, 40 models",
            axis="rps",
            models=(40,),
            rps=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0, 1.25, 1.5, 1.75),
        ),
        *(_fig12(lengths, rps) for lengths in ("ix2", "ox2") for rps in (0.1, 0.5)),
        *(_fig13(letter, scale) for letter, scale in (("a", 0.5), ("b", 0.3), ("c", 0.2))),
        *(_fig17_a10(suffix, scale) for suffix, scale in _SCALES),
        *(_fig17_72b(suffix, scale) for suffix, scale in _SCALES),
        *other_panels(),
    )


_SCALES = (("", 1.0), ("-strict", 0.5), ("-loose", 2.0))


def _fig11a() -> FigurePanel:
    return FigurePanel(
        "aegaeon-fig11a",
        "16xH800, 0.1 rps per model",
        Box(16, "H800"),
        PoissonArrivals(),
        COMPARED,
        models=(20, 32, 40, 50, 60, 70, 80, 100, 120, 140, 160, 170, 180),
        rps=(0.1,),
        duration_s=_TEN_MINUTES_S,
        num_prefill=6,
    )


def _fig12(lengths: str, rps: float) -> FigurePanel:
    """Return figure 12. The paper's caption says "under varying RPS"; 0.5 rps is figure 11b's."""
    what = {"ix2": "prompts", "ox2": "outputs"}[lengths]
    busy = rps == 0.5
    return replace(
        _fig11a(),
        name=f"aegaeon-fig12-{lengths}" + ("-rps0.5" if busy else ""),
        title=f"{what} twice as long, {rps} rps per model",
        workload=PoissonArrivals(lengths),
        models=(8, 16, 24, 32, 40, 48, 56)
        if busy
        else (20, 32, 40, 50, 60, 70, 80, 100, 120, 140, 160),
        rps=(rps,),
    )


def _fig13(letter: str, scale: float) -> FigurePanel:
    targets = _scaled_targets(scale, scale)
    return replace(
        _fig11a(),
        name=f"aegaeon-fig13{letter}",
        title=f"targets x {scale}: TTFT {targets.ttft_s:g} s, TBT {targets.tbt_s * 1e3:g} ms",
        targets=targets,
        models=(10, 20, 32, 40, 50, 60, 70, 80, 100, 120, 140),
    )


def _fig17_a10(suffix: str, scale: float) -> FigurePanel:
    """Return figure 17 on A10s; Aegaeon does not prefetch, because two models exceed 24 GB."""
    return FigurePanel(
        f"aegaeon-fig17-a10{suffix}",
        f"4xA10, 0.1 rps per model, TBT x {scale:g}",
        Box(4, "A10"),
        PoissonArrivals(),
        COMPARED,
        models=(2, 4, 6, 8, 10, 12, 14, 16),
        rps=(0.1,),
        targets=_scaled_targets(1.0, scale),
        duration_s=_TEN_MINUTES_S,
        shapes=_SMALL_SHAPES,
        num_prefill=2,
        without_prefetch=("aegaeon",),
    )


def _fig17_72b(suffix: str, scale: float) -> FigurePanel:
    return FigurePanel(
        f"aegaeon-fig17-72b{suffix}",
        f"8xH800 by fours, four 72B models, TTFT x {scale:g}",
        Box(2, "H800", (4,)),
        PoissonArrivals(),
        COMPARED,
        axis="rps",
        models=(4,),
        rps=(0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8),
        targets=_scaled_targets(scale, 1.0),
        duration_s=_TEN_MINUTES_S,
        shapes=("Qwen-72B",),
        num_prefill=1,
    )


def _fig6() -> FigurePanel:
    """Return figure 6, which has no numbers, as an experiment.

    Two long answers are running when prompts to three models arrive in turn, four a second. Only
    two of the three models fit on a device, so serving prompts first costs switches.
    """
    long = [SimRequest(f"r{n}", f"m{n:02}", 0.1 * n, 512, 1000) for n in range(2)]
    burst = [SimRequest(f"r{n}", f"m{(n - 2) % 3:02}", 1.5 + n / 4, 768, 80) for n in range(2, 32)]
    return FigurePanel(
        "aegaeon-fig6",
        "2xH800, three 13B models: long answers, then a burst of prompts",
        Box(2, "H800"),
        FixedRequests((*long, *burst), 30.0),
        ("prefill-first", "decode-first", "aegaeon"),
        targets=Targets(6.0, 0.1),
        shapes=("Llama-2-13B",),
        num_prefill=1,
    )


def _scaled_targets(ttft_scale: float, tbt_scale: float) -> Targets:
    usual = Targets()
    return Targets(round(usual.ttft_s * ttft_scale, 6), round(usual.tbt_s * tbt_scale, 6))


def _traces() -> tuple[FigurePanel, ...]:
    """Return recorded workloads at the recorded rate, on boxes so small that policies differ."""
    minute_s = 60.0

    def panel(
        name: str, title: str, num_devices: int, num_prefill: int, workload: Workload
    ) -> FigurePanel:
        box = Box(num_devices, "H800")
        return FigurePanel(name, title, box, workload, COMPARED, num_prefill=num_prefill)

    conv = RecordedTrace("azure23_conv.csv.gz", window_s=(17 * minute_s, 37 * minute_s))
    code = RecordedTrace("azure23_code.csv.gz", window_s=(9 * minute_s, 29 * minute_s))
    mooncake = RecordedTrace("mooncake_conv.csv.gz", window_s=(38 * minute_s, 58 * minute_s))
    arena = RecordedTrace("arena27_first5min.csv.gz")
    servegen4 = RecordedTrace("servegen_4models_1h.csv.gz", window_s=(17 * minute_s, 37 * minute_s))
    market = RecordedTrace("servegen_market100_2h.csv.gz", window_s=(0.0, 20 * minute_s))
    functions = FunctionCalls("azfunc19_200fn_day.csv.gz", first_minute=959)
    bursty = FunctionCalls("azfunc19_100fn_bursty_day.csv.gz", first_minute=648)
    spread = "given to {} models by a Zipf draw"
    return (
        replace(
            panel("azure23-conv", f"Azure 2023 chat, {spread.format(60)}", 8, 3, conv), models=(60,)
        ),
        replace(
            panel("azure23-code", f"Azure 2023 coding, {spread.format(40)}", 4, 2, code),
            models=(40,),
        ),
        replace(
            panel("mooncake-conv", f"Mooncake long chats, {spread.format(30)}", 8, 3, mooncake),
            models=(30,),
            shapes=_LONG_PROMPT_SHAPES,
        ),
        panel("arena27", "chatbot arena, 22 models", 3, 1, arena),
        panel("servegen-4models", "ServeGen: four models, 6B to 32B", 3, 1, servegen4),
        panel("servegen-market100", "ServeGen: a market of models, 6B to 32B", 6, 2, market),
        panel("azfunc19-200", "Azure Functions as models, ShareGPT lengths", 4, 1, functions),
        panel("azfunc19-100", "bursty Azure Functions as models, ShareGPT lengths", 6, 2, bursty),
    )


def _synth() -> tuple[FigurePanel, ...]:
    """Return the Aegaeon artifact's own request lists, one or two minutes each."""
    return tuple(
        FigurePanel(
            f"aegaeon-synth-{scenario}",
            f"request list {scenario} of the Aegaeon artifact on 16xH800",
            Box(16, "H800"),
            RecordedTrace("aegaeon_synth.csv.gz", scenario),
            COMPARED,
            num_prefill=6,
        )
        for scenario in SYNTH_SCENARIOS
    )
