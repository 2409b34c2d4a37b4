"""Presets of small boxes, bursts, overload and hot models: panels of one point or one rate axis."""

from __future__ import annotations

from dataclasses import replace

from gpupoold.domain import Role, Targets
from gpupoold.sim.boxes import Box
from gpupoold.sim.conversations import Conversations
from gpupoold.sim.lengths import Lengths
from gpupoold.sim.named_models import SMALL_BOX, NamedArrivals
from gpupoold.sim.scenario import FigurePanel, Phases, PoissonArrivals

COMPARED = (
    "gpupool",
    "aegaeon",
    "request-level",
    "request-level-4",
    "request-level-sjf",
    "static",
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
        targets=min((one.targets for one in SMALL_BOX), key=lambda one: (one.ttft_s, one.tbt_s)),
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
