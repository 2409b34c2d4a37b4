"""Experiments by name: figures of the Aegaeon paper, and recorded workloads.

A preset consists of panels. Where a panel has None or no values, the workload's values are used.
Engines are free in the figures of the Aegaeon paper, whose GPUs have one for all models each, and
in the recorded workloads, which compare the same policies.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from gpupoold.domain import Role, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import Box
from gpupoold.sim.host import FREE_ENGINES, NO_WISHES
from gpupoold.sim.lengths import Lengths, sharegpt_lengths
from gpupoold.sim.scenario import (
    Draw,
    DrawnModel,
    DrawnWorkload,
    FigurePanel,
    FixedRequests,
    Phases,
    PoissonArrivals,
    Workload,
    description,
)
from gpupoold.sim.traces import FunctionCalls, RecordedTrace
from gpupoold.sim.workloads import SimRequest, in_arrival_order, model_names, poisson_workload

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

COMPARED = ("gpupool", "aegaeon", "request-level", "request-level-4", "request-level-sjf", "static")


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
        _fig11a(),
        name="poisson",
        policies=("gpupool", "request-level"),
        models=(40, 70),
        host_wishes=NO_WISHES,
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
        host_wishes=FREE_ENGINES,
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
        host_wishes=FREE_ENGINES,
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
        host_wishes=FREE_ENGINES,
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
        host_wishes=FREE_ENGINES,
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
        return FigurePanel(
            name,
            title,
            box,
            workload,
            COMPARED,
            num_prefill=num_prefill,
            host_wishes=FREE_ENGINES,
        )

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
            host_wishes=FREE_ENGINES,
        )
        for scenario in SYNTH_SCENARIOS
    )


def other_panels() -> tuple[FigurePanel, ...]:
    """Return all panels of this module."""
    return (*bursts(), _small_box(), _aladdin_fig10(), _overload(), _conversations())


def _small_box() -> FigurePanel:
    """Return a box in which placement decides: rows have the strictest targets of its models."""
    return FigurePanel(
        "small-box",
        "4xA10, seven models of 7 to 9 billion parameters with targets of their own",
        Box(4, "A10"),
        NamedArrivals(SMALL_BOX),
        COMPARED,
        targets=min(
            (model.targets for model in SMALL_BOX),
            key=lambda targets: (targets.ttft_s, targets.tbt_s),
        ),
        duration_s=1800.0,
        num_prefill=2,
    )


def _conversations() -> FigurePanel:
    """Return conversations, whose prompts are mostly the turns before."""
    return FigurePanel(
        "conversations",
        "2xA100-80, models of 7 to 13 billion parameters, conversations of six turns",
        Box(2, "A100-80"),
        Conversations(),
        COMPARED,
        models=(4, 8, 12, 16),
        rps=(0.1,),
        targets=Targets(2.0, 0.1),
        duration_s=600.0,
    )


def _aladdin_fig10() -> FigurePanel:
    """Return a hot model on several GPUs, as in figure 10 of Aladdin: placement alone decides.

    The paper searches the least number of GPUs for a rate; this panel, the rate for four GPUs. The
    targets are the paper's for 13B models on A100 (appendix H).
    """
    return FigurePanel(
        "aladdin-fig10",
        "4xA100-80, one 13B model",
        Box(4, "A100-80"),
        PoissonArrivals(),
        ("gpupool", "best-fit", "shortest-queue", "power-of-two"),
        axis="rps",
        models=(1,),
        rps=(2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0),
        targets=Targets(0.6, 0.03),
        duration_s=300.0,
        shapes=("Llama-2-13B",),
    )


def _overload() -> FigurePanel:
    """Return an overload of one model by its prompts, in the setting of Prism's algorithm 2.

    Prompts alone need 0.69, 0.83, 0.96 and 1.10 of the device.
    """
    return FigurePanel(
        "prism-overload",
        "1xA100-80, an 8B model, prompts of 2048 tokens: which requests are in time",
        Box(1, "A100-80"),
        PoissonArrivals(Lengths(2048, 28)),
        COMPARED,
        axis="rps",
        models=(1,),
        rps=(5.0, 6.0, 7.0, 8.0),
        targets=Targets(2.0, 0.1),
        duration_s=60.0,
        shapes=("Llama-3.1-8B",),
    )


def bursts() -> tuple[FigurePanel, ...]:
    """Return section VI-B2 of TokenScale: a prefill and a convertible decode device in a burst.

    The paper gives neither lengths nor the duration of the burst. This panel uses one minute and
    the mean lengths of the Azure coding trace; ten such requests a second need 1.4 prefill devices.
    Targets are the paper's for prompts of 2048 tokens (section V).
    """
    split = FigurePanel(
        "tokenscale-burst-converting",
        "2xA100-80, an 8B model: 1, then 10, then 1 request/s; decoder converts",
        Box(2, "A100-80"),
        Phases(((60.0, 1.0), (60.0, 10.0), (60.0, 1.0)), Lengths(2048, 28)),
        ("gpupool",),
        targets=Targets(2.0, 0.1),
        shapes=("Llama-3.1-8B",),
        roles=(Role.PREFILL, Role.DECODE),
        burst_s=(60.0, 120.0),
    )
    return (
        split,
        replace(
            split,
            name="tokenscale-burst-fixed",
            title="the same, and the decoder never prefills",
            converts_decoders=False,
        ),
        replace(
            split,
            name="tokenscale-burst-mixed",
            title="the same, and both devices do both",
            roles=(Role.MIXED,),
        ),
    )


@dataclass(frozen=True, slots=True)
class Conversations(Workload):
    """Poisson beginnings of conversations, equal for all models, of ``num_turns`` each in the mean.

    A further turn comes after a pause of ``pause_s`` in the mean, whenever the turn before is
    answered, and has the history, which ends at ``max_tokens``, and new text before. The text of a
    user and of an answer have ShareGPT's lengths. ``rps`` of a draw is the rate of turns.
    """

    num_turns: float = 6.0
    pause_s: float = 60.0
    max_tokens: int = 16_384

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError without a number of models, a rate and a duration."""
        if draw.num_models is None or draw.rps is None or draw.duration_s is None:
            raise UsageError("conversations need a number of models, a rate and a duration")
        names = tuple(model_names(draw.num_models))
        streams = (self._stream(name, draw.rps, draw.duration_s, draw.seed) for name in names)
        requests = in_arrival_order(request for stream in streams for request in stream)
        return DrawnWorkload(requests, names, draw.duration_s)

    def _stream(self, model: str, rps: float, duration_s: float, seed: int) -> Iterator[SimRequest]:
        """Yield the turns of one model's conversations; conversations have begun before the run."""
        rng, lengths = Random(f"{seed}/{model}/conversations"), sharegpt_lengths()
        number, begin_s = 0, -self.num_turns * self.pause_s
        while True:
            begin_s += rng.expovariate(rps / self.num_turns)
            if begin_s >= duration_s:
                return
            number, at_s, history_tokens = number + 1, begin_s, 0
            while True:
                prompt_tokens, output_tokens = lengths.sample(rng)
                whole = history_tokens + prompt_tokens
                if whole + output_tokens > self.max_tokens:
                    break
                if 0 <= at_s < duration_s:
                    name = f"c{number}"
                    yield SimRequest("", model, at_s, whole, output_tokens, name, history_tokens)
                history_tokens = whole + output_tokens
                at_s += rng.expovariate(1 / self.pause_s)
                if rng.random() < 1 / self.num_turns:
                    break


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of a box; ``shape`` is a name of packaged dimensions."""

    name: str
    shape: str
    targets: Targets
    rps: float


SMALL_BOX = (
    NamedModel("qwen-7b", "Qwen2.5-7B", Targets(2.0, 0.05), 0.35),
    NamedModel("coder-7b", "Qwen2.5-7B", Targets(1.0, 0.05), 0.12),
    NamedModel("llama-8b", "Qwen2.5-7B", Targets(4.0, 0.1), 0.2),
    NamedModel("yi-9b", "Yi-1.5-9B", Targets(4.0, 0.1), 0.15),
    NamedModel("translate", "Yi-1.5-9B", Targets(10.0, 0.2), 0.12),
    NamedModel("support-bot", "Qwen2.5-7B", Targets(2.0, 0.1), 0.25),
    NamedModel("summaries", "Yi-1.5-9B", Targets(30.0, 0.5), 0.1),
)
"""Seven models for four GPUs of 24 GB, no two of which fit on one together."""


@dataclass(frozen=True, slots=True)
class NamedArrivals(Workload):
    """Poisson arrivals, each model at its own rate, with ShareGPT lengths."""

    models: tuple[NamedModel, ...]

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Scale all rates if a mean rate is given.

        Raises UsageError if a number of models is given, or no duration.
        """
        if draw.num_models is not None:
            raise UsageError("this preset's models are fixed: no --models")
        if draw.duration_s is None:
            raise UsageError("Poisson arrivals need a duration")
        mean_rps = sum(model.rps for model in self.models) / len(self.models)
        factor = 1.0 if draw.rps is None else draw.rps / mean_rps
        rates = {model.name: model.rps * factor for model in self.models}
        requests = poisson_workload(rates, draw.duration_s, sharegpt_lengths(), draw.seed)
        own = {model.name: DrawnModel(model.shape, model.targets) for model in self.models}
        return DrawnWorkload(requests, tuple(rates), draw.duration_s, own)
