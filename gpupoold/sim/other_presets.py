"""Presets of small boxes, bursts, overload and hot models: panels of one point or one rate axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from gpupoold.domain import Role, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import Box
from gpupoold.sim.lengths import Lengths, sharegpt_lengths
from gpupoold.sim.scenario import (
    Draw,
    DrawnModel,
    DrawnWorkload,
    FigurePanel,
    Phases,
    PoissonArrivals,
    WithoutFile,
)
from gpupoold.sim.workloads import SimRequest, in_arrival_order, model_names, poisson_workload

COMPARED = ("gpupool", "aegaeon", "request-level", "request-level-4", "request-level-sjf", "static")


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


@dataclass(frozen=True, slots=True)
class Conversations(WithoutFile):
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
class NamedArrivals(WithoutFile):
    """Poisson arrivals, each model at its own rate, with ShareGPT lengths."""

    models: tuple[NamedModel, ...]

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Scale all rates if a mean rate is given.

        Raises:
            UsageError: a number of models is given, or no duration.
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
