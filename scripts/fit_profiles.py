#!/usr/bin/env python3
"""Fit the packaged latency profiles, ``gpupoold/latency/measured.csv``, to public grids.

    python scripts/fit_profiles.py --profiles DIR [--output FILE]

DIR holds two files of measured prefill and decode times:

``aegaeon_prefill_decode.csv.gz``
    ``set, model, gpu, tp, input_tokens, batch, prefill_ms_p50, decode_step_ms_p50, suspect``:
    from the artifact of the Aegaeon paper, ten output tokens each. Rows marked suspect (prefills
    that ran in two parts) are left out.
``splitwise_prefill_decode.csv``
    ``model, gpu, tp, prompt_tokens, batch, output_tokens, prefill_ms, decode_step_ms, e2e_ms``:
    from the artifact of the Splitwise paper.

The cost of attention has a floor, given by the hardware's peak: the grids end at a few thousand
tokens, where noise hides the cost of attention, so a fit without a floor may be far off at long
prompts. The fit minimises relative errors, or absolute errors if R-squared would be 0.9 or below.
A pair that fits badly in both ways is left out, with a message on stderr. The limits are wider for
groups of GPUs, whose steps vary little with the batch.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from gpupoold.latency.models import (
    ATTENTION_BLOCK_SIZE,
    DecodeBatch,
    DecodeSample,
    FitQuality,
    LinearDecode,
    PrefillModel,
    PrefillSample,
    Weighting,
)
from gpupoold.latency.profiles import COLUMNS
from gpupoold.latency.shape import FitError, HardwareProfile, ModelShape, builtin_shape, hardware
from gpupoold.worker.profiling import fit_law

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "gpupoold/latency/measured.csv"
MIN_R_SQUARED = 0.9
MAX_MEAN_ERROR = 0.15
# On a group a step is mostly launches and exchanges between GPUs, nearly the same for all batches:
# little variance to explain, so that R-squared says less.
MIN_R_SQUARED_OF_GROUP = 0.7
MAX_MEAN_ERROR_OF_GROUP = 0.2

AEGAEON_FILE = "aegaeon_prefill_decode.csv.gz"
AEGAEON_SOURCE = (
    "MachineLearningSystem/25SOSP-Aegaeon@1c3b110a5e69be3f3ac3a3b71f7eba9ce65b7cfd aegaeon/profiles"
)
AEGAEON_MODELS = {
    "baichuan_7b": "Baichuan-7B",
    "baichuan2_13b_chat": "Baichuan2-13B",
    "internlm2_5_7b_chat": "InternLM2.5-7B",
    "llama2_7b": "Llama-2-7B",
    "llama2_13b_chat": "Llama-2-13B",
    "qwen_7b": "Qwen-7B",
    "qwen_7b_chat": "Qwen-7B",
    "qwen_14b_chat": "Qwen-14B",
    "qwen1_5_14b_chat": "Qwen1.5-14B",
    "qwen2_5_7b": "Qwen2.5-7B",
    "yi1_5_6b_chat": "Yi-1.5-6B",
    "yi1_5_9b_chat": "Yi-1.5-9B",
}
# Groups of GPUs are in the tables of the artifact's simulator.
AEGAEON_GROUP_MODELS = {
    "baichuan-7b": "Baichuan-7B",
    "baichuan2-13b-chat": "Baichuan2-13B",
    "llama2-7b-chat": "Llama-2-7B",
    "llama2-13b": "Llama-2-13B",
    "qwen-7b": "Qwen-7B",
    "qwen-7b-chat": "Qwen-7B",
    "qwen1.5-14b-chat": "Qwen1.5-14B",
}
# The artifact does not state the memory size of the A100.
AEGAEON_GPUS = {"A10": "A10", "A100": "A100-80", "H100": "H100", "H20": "H20", "H800": "H800"}
# The step for token i of ten attends to input + i tokens: on average five more than the input.
AEGAEON_MEAN_OUTPUT_TOKENS = 5

SPLITWISE_FILE = "splitwise_prefill_decode.csv"
SPLITWISE_SOURCE = (
    "Mutinifni/splitwise-sim@8f99e7dc9b407f4ce2488d03dd44c0b8b946dab0 data/perf_model.csv"
)
SPLITWISE_GPUS = {"a100-80gb": "A100-80", "h100-80gb": "H100"}
SPLITWISE_MODELS = {"llama2-70b": "Llama-2-70B"}


class Pair(NamedTuple):
    """The GPU and model of a profile, and the source of the points."""

    gpu: str
    model: str
    num_gpus: int
    source: str
    licence: str


class Point(NamedTuple):
    """A measured point of a grid."""

    prefill: PrefillSample
    decode: DecodeSample


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the profiles; return 1 if no pair fits well."""
    parser = argparse.ArgumentParser(description="Fit the packaged latency profiles.")
    parser.add_argument("--profiles", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE")
    options = parser.parse_args(arguments)
    grids: dict[Pair, list[Point]] = defaultdict(list)
    for pair, point in (*_aegaeon(options.profiles), *_splitwise(options.profiles)):
        grids[pair].append(point)
    rows = [row for pair, points in sorted(grids.items()) for row in _rows(pair, points)]
    with options.output.open("w", newline="", encoding="utf-8") as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    print(f"{options.output}: {len(rows) // 2} of {len(grids)} pairs", file=sys.stderr)
    return 0 if rows else 1


def _aegaeon(folder: Path) -> Iterator[tuple[Pair, Point]]:
    with gzip.open(folder / AEGAEON_FILE, "rt", encoding="utf-8") as file:
        for row in _read(file):
            num_gpus = int(row["tp"])
            models = AEGAEON_MODELS if num_gpus == 1 else AEGAEON_GROUP_MODELS
            is_wanted = row["set"] == ("profiles" if num_gpus == 1 else "sim")
            if not is_wanted or row["suspect"] != "0" or row["model"] not in models:
                continue
            gpu, model = AEGAEON_GPUS[row["gpu"]], models[row["model"]]
            batch, length = int(row["batch"]), int(row["input_tokens"])
            context = batch * (length + AEGAEON_MEAN_OUTPUT_TOKENS)
            yield (
                Pair(gpu, model, num_gpus, AEGAEON_SOURCE, "Apache-2.0"),
                Point(
                    PrefillSample((length,) * batch, float(row["prefill_ms_p50"]) / 1e3),
                    DecodeSample(
                        DecodeBatch(batch, context), float(row["decode_step_ms_p50"]) / 1e3
                    ),
                ),
            )


def _splitwise(folder: Path) -> Iterator[tuple[Pair, Point]]:
    with (folder / SPLITWISE_FILE).open(encoding="utf-8") as file:
        for row in _read(file):
            if row["model"] not in SPLITWISE_MODELS or row["gpu"] not in SPLITWISE_GPUS:
                continue
            gpu, model = SPLITWISE_GPUS[row["gpu"]], SPLITWISE_MODELS[row["model"]]
            prefill_ms, step_ms = float(row["prefill_ms"]), float(row["decode_step_ms"])
            # Some answers ended before the requested number of tokens; the total time shows how
            # many tokens were made.
            made = (float(row["e2e_ms"]) - prefill_ms) / step_ms
            batch, length = int(row["batch"]), int(row["prompt_tokens"])
            context = round(batch * (length + made / 2))
            yield (
                Pair(gpu, model, int(row["tp"]), SPLITWISE_SOURCE, "MIT"),
                Point(
                    PrefillSample((length,) * batch, prefill_ms / 1e3),
                    DecodeSample(DecodeBatch(batch, context), step_ms / 1e3),
                ),
            )


def _read(file: TextIO) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(file)


def _rows(pair: Pair, points: Sequence[Point]) -> list[list[str]]:
    """Return the rows of both phases, or none, with the reason on stderr."""
    prefills = [point.prefill for point in points]
    decodes = [point.decode for point in points]
    shape, gpu = builtin_shape(pair.model), hardware(pair.gpu)
    prefill_least = prefill_floors(shape, gpu, pair.num_gpus)
    decode_least = decode_floors(shape, gpu, pair.num_gpus)
    found: list[tuple[str, Weighting, tuple[float, ...], FitQuality]] = []
    for weighting in (Weighting.RELATIVE, Weighting.ABSOLUTE):
        try:
            prefill = fit_law(
                PrefillModel.of(shape), prefills, weighting=weighting, floors=prefill_least
            )
            decode = fit_law(LinearDecode(), decodes, weighting=weighting, floors=decode_least)
        except FitError as error:
            print(f"left out: {pair[:3]}: {error}", file=sys.stderr)
            return []
        phases = {phase for phase, *_ in found}
        for phase, constants, quality in (
            ("prefill", prefill.law.constants, prefill.quality),
            ("decode", decode.law.constants, decode.quality),
        ):
            if phase not in phases and _is_good(quality, pair.num_gpus):
                found.append((phase, weighting, constants, quality))
            elif phase not in phases and weighting is Weighting.ABSOLUTE:
                print(f"left out: {pair[:3]}: {phase}: {quality}", file=sys.stderr)
    return [_row(pair, *entry) for entry in sorted(found)] if len(found) == 2 else []


def prefill_floors(
    shape: ModelShape, gpu: HardwareProfile, num_gpus: int = 1
) -> tuple[float, float, float]:
    """Return floors of C1, C2, C3 of ``PrefillModel``: 0 except for C2.

    Causal attention over a prompt of ``l`` tokens takes ``2 l^2`` operations per layer and per unit
    of width; the term is ``3 h l^2 / b``.
    """
    width = shape.num_heads * shape.head_dim
    operations = 2 * shape.num_layers * width / (gpu.bf16_flops * num_gpus)
    return 0.0, operations * ATTENTION_BLOCK_SIZE / (3 * shape.hidden_size), 0.0


def decode_floors(
    shape: ModelShape, gpu: HardwareProfile, num_gpus: int = 1
) -> tuple[float, float, float]:
    """Return floors of k2, c2, c3 of ``LinearDecode``: 0 except k2, the read of a token's KV."""
    read_s = shape.kv_bytes_per_token / (gpu.memory_bandwidth_bytes_per_s * num_gpus)
    return read_s, 0.0, 0.0


def _is_good(quality: FitQuality, num_gpus: int) -> bool:
    least, most = MIN_R_SQUARED, MAX_MEAN_ERROR
    if num_gpus > 1:
        least, most = MIN_R_SQUARED_OF_GROUP, MAX_MEAN_ERROR_OF_GROUP
    return quality.r_squared > least and quality.mean_relative_error <= most


def _row(
    pair: Pair, phase: str, weighting: Weighting, constants: tuple[float, ...], quality: FitQuality
) -> list[str]:
    return [
        pair.gpu,
        pair.model,
        str(pair.num_gpus),
        phase,
        *(f"{constant:.6g}" for constant in constants),
        weighting,
        f"{quality.r_squared:.4f}",
        f"{quality.mean_relative_error:.4f}",
        f"{quality.p90_relative_error:.4f}",
        str(quality.num_points),
        pair.source,
        pair.licence,
    ]


if __name__ == "__main__":
    sys.exit(main())
