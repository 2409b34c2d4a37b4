"""Decode speed of a model with KV layouts with layers outermost and with blocks outermost.

Uses vLLM alone, with a process per layout, because vLLM reads the layout once. Both processes run
at the same time and decode alternately. A CPU has only one layout: in a dry run both processes have
the same layout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import IO, TYPE_CHECKING, Any

from benchmarks.gpu import figures
from benchmarks.gpu.rig import MAX_MODEL_LEN, Setting, arguments, setting_of
from gpupoold.errors import Failed

if TYPE_CHECKING:
    from vllm import LLM

LAYOUTS = {"layers_outermost": "LBNHC", "blocks_outermost": "BLNHC"}
_DRY_LAYOUT = "LBHNC"
_WARM_UP = 1
_ROUNDS = 6
_NUM_STREAMS = 16
_PROMPT_TOKENS, _NUM_TOKENS = 1024, 256
_DRY_PROMPT_TOKENS, _DRY_NUM_TOKENS = 48, 8
_KV_BYTES = 8 << 30
_DRY_KV_BYTES = 1 << 26
# Time left for the work after the last round.
_END_S = 6.0


def run(setting: Setting, args: argparse.Namespace) -> None:
    """Measure and report after each round."""
    setting.checkpoint(args.shape)
    seconds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    digests: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(args, name)) for name in LAYOUTS}
        for index in range(_WARM_UP + _ROUNDS):
            began_s = time.monotonic()
            for name, engine in engines.items():
                taken_s, digests[name] = _ask(engine)
                if index >= _WARM_UP:
                    seconds[name].append(taken_s)
            if index >= _WARM_UP:
                found = layout_figures(args.shape, seconds, _num_tokens(setting) * _NUM_STREAMS)
                setting.report.add(found, seconds=seconds)
            if setting.left_s < _END_S + 2 * (time.monotonic() - began_s):
                break
    first, second = digests.values()
    differing = sum(one != other for one, other in zip(first, second, strict=True))
    name = f"{args.shape}_decode_layouts_differing_answers"
    setting.report.add({name: figures.measured(differing)})


def layout_figures(
    shape: str, seconds: dict[str, list[float]], num_tokens: int
) -> dict[str, figures.Figure]:
    """Tokens a second with each layout, and how they compare round by round."""
    found = {
        f"{shape}_decode_{name}_tokens_per_s": figures.measured(num_tokens / median(taken))
        for name, taken in seconds.items()
    }
    layers_s, blocks_s = (seconds[name] for name in LAYOUTS)
    ratios = [one / other for one, other in zip(layers_s, blocks_s, strict=True)]
    found[f"{shape}_decode_blocks_over_layers_outermost_ratio"] = figures.measured(median(ratios))
    return found


@contextlib.contextmanager
def _engine(args: argparse.Namespace, layout: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {
        "VLLM_KV_CACHE_LAYOUT": _DRY_LAYOUT if args.dry_run == "emulated" else LAYOUTS[layout],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.decode_layouts", *sys.argv[1:], "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ask(engine: subprocess.Popen[str]) -> tuple[float, list[list[int]]]:
    """Seconds of one round, and its answers."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write("\n")
    engine.stdin.flush()
    line = engine.stdout.readline()
    if not line:
        raise Failed("an engine of one layout has ended", "its words are in this piece's log")
    answer: tuple[float, list[list[int]]] = json.loads(line)
    return answer


def serve(setting: Setting, shape: str, orders: IO[str], answers: IO[str]) -> None:
    """Answer each line with a round, in a process of its own."""
    llm = _llm(setting, shape)
    prompt_tokens = _DRY_PROMPT_TOKENS if setting.is_dry else _PROMPT_TOKENS
    prompts = [
        [300 + (number * 31 + index) % 1500 for index in range(prompt_tokens)]
        for number in range(_NUM_STREAMS)
    ]
    for _ in orders:
        print(json.dumps(_round(llm, prompts, _num_tokens(setting))), file=answers, flush=True)


def _round(
    llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[float, list[list[int]]]:
    """All prompts at once; after the first round their prefixes are cached, so it is decoding."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    began_s = time.perf_counter()
    told = llm.generate(asked, sampling, use_tqdm=False)
    return time.perf_counter() - began_s, [list(one.outputs[0].token_ids) for one in told]


def _llm(setting: Setting, shape: str) -> LLM:
    from vllm import LLM

    return LLM(
        model=str(setting.checkpoint(shape)),
        dtype=setting.dtype,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=setting.is_emulated,
        gpu_memory_utilization=0.3 if setting.is_emulated else 0.05,
        kv_cache_memory_bytes=_DRY_KV_BYTES if setting.is_dry else _KV_BYTES,
    )


def _num_tokens(setting: Setting) -> int:
    return _DRY_NUM_TOKENS if setting.is_dry else _NUM_TOKENS


def main() -> int:
    """Run it; see the module."""
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    setting = setting_of(args)
    if args.serve:
        # Libraries print to stdout; the answers need a descriptor of their own.
        with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            serve(setting, args.shape, sys.stdin, answers)
    else:
        run(setting, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
