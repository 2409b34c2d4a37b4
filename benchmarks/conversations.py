"""Later turns of conversations beside other models: ``make bench-conversations``.

Four models share a device that holds one and a half of them. In each of six rounds every one of 40
conversations has a turn, one after the other, so that other models run between two turns of a
conversation. The same turns are asked of gpupool, of gpupool without a prefix cache in host memory,
and of ``vllm serve`` with one model at a time and memory for all KV. Writes
``build/bench-conversations.json``; exit code 1 when a figure was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.overhead import EMULATED_OPTIONS, vllm_serve
from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.private_daemon import private_daemon
from benchmarks.report import at_least, at_most, finish
from gpupoold.stats.histogram import percentile

ARCHITECTURES = ["llama", "mixtral", "qwen2", "qwen3"]
MODEL_BYTES = 20_000_000
NUM_CONVERSATIONS = 40
NUM_TURNS = 6
FIRST_TOKENS = (1000, 3500)
USER_TOKENS = 40
ANSWER_TOKENS = 48
MAX_MODEL_LEN = 4096
_ROOM = 1.5  # models on the device
_KV_BYTES = 96 << 20  # on the device, beside the weights
_KV_HOST = "4GiB"
_BLOCK_TOKENS = 32
_OTHER_TTFT_S = 0.03


@dataclass(slots=True)
class Turn:
    """A follow-up turn of a conversation, as a client sees it."""

    ttft_s: float
    num_prompt_tokens: int
    num_earlier_tokens: int
    """Tokens of the prompt that earlier turns have computed."""
    facts: Mapping[str, str]
    """Headers of the answer."""

    def fact(self, name: str) -> float:
        return float(self.facts.get(f"x-gpupool-{name}", 0))


@dataclass(slots=True)
class Served:
    """What a server answered: the later turns, and all answers in order."""

    turns: list[Turn] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Conversation:
    """One conversation; the user's words do not depend on the answers."""

    model: str
    number: int
    tokens: list[int] = field(default_factory=list)

    def say(self, turn: int) -> None:
        """Add the user's words of a turn."""
        rng = random.Random(f"{self.number}-{turn}")
        num_tokens = USER_TOKENS if turn else rng.randrange(*FIRST_TOKENS)
        self.tokens += [rng.randrange(300, 1900) for _ in range(num_tokens)]


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.conversations")
    parser.add_argument("--out", type=Path, default=Path("build/bench-conversations.json"))
    parser.add_argument("--conversations", type=int, default=NUM_CONVERSATIONS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpupool-conversations-") as name:
        paths = make_checkpoints(Path(name), ARCHITECTURES, MODEL_BYTES)
        conversations = [
            Conversation(paths[number % len(paths)].name, number)
            for number in range(arguments.conversations)
        ]
        with _pool(paths, "") as url:
            kept = serve(url, conversations)
        with _pool(paths, "prefix_cache = 0\n") as url:
            dropped = serve(url, conversations)
        alone = Served()
        for path in paths:
            with vllm_serve(path, MAX_MODEL_LEN, options=_vllm_options()) as url:
                mine = [one for one in conversations if one.model == path.name]
                served = serve(url, mine)
            alone.turns += served.turns
            alone.answers |= served.answers
    return finish(arguments.out, figures_of(kept, dropped, alone), **parts_of(kept, dropped, alone))


def figures_of(kept: Served, dropped: Served, alone: Served) -> dict[str, dict[str, Any]]:
    """The figures beside what is wanted."""
    others_s = percentile([turn.ttft_s - turn.fact("switch-ms") / 1000 for turn in kept.turns], 0.5)
    cached = sum(turn.fact("cached-tokens") for turn in kept.turns)
    earlier = sum(_whole_blocks(turn.num_earlier_tokens) for turn in kept.turns)
    return {
        "differing_answers": at_most(_num_differing(kept, alone), 0),
        "differing_answers_without": at_most(_num_differing(dropped, alone), 0),
        "hit_share": at_least(cached / earlier, 0.95),
        "ttft_beyond_copies_p50_s": at_most(others_s or 0.0, _OTHER_TTFT_S),
    }


def parts_of(kept: Served, dropped: Served, alone: Served) -> dict[str, Any]:
    """The times of each server."""
    found = {}
    for name, served in (("kept", kept), ("dropped", dropped), ("vllm", alone)):
        ttfts_s = [turn.ttft_s for turn in served.turns]
        found[name] = {
            "turns": len(ttfts_s),
            "ttft_p50_s": percentile(ttfts_s, 0.5),
            "ttft_p90_s": percentile(ttfts_s, 0.9),
            "switch_p50_s": percentile([one.fact("switch-ms") / 1000 for one in served.turns], 0.5),
            "prefill_p50_s": percentile(
                [one.fact("prefill-ms") / 1000 for one in served.turns], 0.5
            ),
            "queue_p50_s": percentile([one.fact("queue-ms") / 1000 for one in served.turns], 0.5),
            "prompt_tokens_p50": percentile([one.num_prompt_tokens for one in served.turns], 0.5),
            "cached_tokens_p50": percentile(
                [one.fact("cached-tokens") for one in served.turns], 0.5
            ),
        }
    return found


def serve(url: str, conversations: Sequence[Conversation]) -> Served:
    """Ask all turns, one after the other."""
    served = Served()
    for one in conversations:
        one.tokens.clear()
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        for turn in range(NUM_TURNS):
            for one in conversations:
                num_earlier = max(0, len(one.tokens) - 1)  # the last token has no KV yet
                one.say(turn)
                prompt = list(one.tokens)
                ttft_s, answer, facts = ask(client, one.model, prompt)
                one.tokens += answer
                served.answers[f"{one.number}-{turn}"] = answer
                if turn:
                    served.turns.append(Turn(ttft_s, len(prompt), num_earlier, facts))
    return served


def ask(
    client: httpx.Client, model: str, prompt: Sequence[int]
) -> tuple[float, list[int], dict[str, str]]:
    """Stream an answer; return its TTFT in seconds, its tokens and the headers."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    started_s = time.perf_counter()
    ttft_s, tokens = 0.0, list[int]()
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                tokens += choice.get("token_ids") or []
            ttft_s = ttft_s or time.perf_counter() - started_s
        facts = dict(response.headers)
    return ttft_s, tokens, facts


def _whole_blocks(num_tokens: int) -> int:
    return num_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS


def _num_differing(one: Served, other: Served) -> int:
    return sum(one.answers[key] != answer for key, answer in other.answers.items())


@contextlib.contextmanager
def _pool(paths: Sequence[Path], memory: str) -> Iterator[str]:
    num_bytes = int(_ROOM * max(map(weight_bytes, paths))) + _KV_BYTES
    config = emulated_config(num_bytes)
    config += f'[memory]\nkv_host = "{_KV_HOST}"\n{memory}'
    with private_daemon(config) as daemon:
        for path in paths:
            daemon.add_model(path.name, path, dtype="float32", max_model_len=MAX_MODEL_LEN)
        yield daemon.http_url


def _vllm_options() -> list[str]:
    options = list(EMULATED_OPTIONS)
    options[options.index("--kv-cache-memory-bytes") + 1] = str(2 << 30)
    return [*options, "--enable-prefix-caching"]


if __name__ == "__main__":
    sys.exit(main())
