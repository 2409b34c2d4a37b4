"""Streams beside loads on small cards: ``make bench-loads`` writes ``build/bench-loads.json``.

A model streams on devices of 1.3, 1.8 and 2.5 models. At a random token another model is added:
from its checkpoint and read in place, from its snapshot, or as a mixture of experts, whose load
borrows pages for three times the experts of a layer. Each trial is compared with the same stream
alone, just before. The mixture is reported and not judged: its stream waits where the device is too
small for both.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.bench.rig import make_checkpoints, weight_bytes
from benchmarks.report import Figure, at_most, finish
from gpupoold.domain import ModelName
from gpupoold.wire import messages as m
from tests.functional.worker_peer import Snapshot, WorkerPeer

MAX_EXTRA_PAUSE_S = 0.1
SIZES = (1.3, 1.8, 2.5)
KINDS = {"checkpoint": "qwen3", "snapshot": "qwen3", "mixture": "mixtral"}
_PROMPT = list(range(5, 95))
_NUM_TOKENS = 400
_MAX_MODEL_LEN = 512


class Trial(NamedTuple):
    """A stream beside a load, and the same stream alone."""

    size: float
    kind: str
    is_exact: bool
    alone_pause_s: float
    pause_s: float
    load_s: float


def main() -> int:
    """Run the trials; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.small_cards")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--model-bytes", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-loads.json"))
    arguments = parser.parse_args()
    chance, trials = random.Random(arguments.seed), list[Trial]()
    gc.disable()  # a collection of this process, of 0.3 s, would count as a pause of the stream
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as name:
        made = make_checkpoints(Path(name), ["llama", "qwen3", "mixtral"], arguments.model_bytes)
        paths = {path.name.removeprefix("tiny-"): path for path in made}
        for size in SIZES:
            trials += run(size, paths, -(-arguments.trials // len(SIZES)), chance)
    parts = {"trials": [one._asdict() for one in trials]}
    return finish(arguments.out, dict(make_figures(trials)), **parts)


def make_figures(trials: list[Trial]) -> Iterator[tuple[str, Figure]]:
    """The figures by name, each beside its limit."""
    yield "streams_that_differ", at_most(sum(not one.is_exact for one in trials), 0)
    for kind in KINDS:
        extra_s = [one.pause_s - one.alone_pause_s for one in trials if one.kind == kind]
        limit_s = float("inf") if kind == "mixture" else MAX_EXTRA_PAUSE_S
        yield f"{kind}_extra_pause_p50_s", at_most(median(extra_s), limit_s)
        yield f"{kind}_extra_pause_max_s", at_most(max(extra_s), limit_s)
        loads_s = [one.load_s for one in trials if one.kind == kind]
        yield f"{kind}_load_p50_s", at_most(median(loads_s), float("inf"))


class Card(WorkerPeer):
    """A small device with a model that streams, and the time of the other model's load."""

    began_s: float | None = None
    load_s: float | None = None

    def add(self, path: Path, snapshot: Snapshot | None) -> None:
        """Order the load of ``added``, of which the scheduler's accounts do not hear."""
        model = m.ModelToLoad(
            name=ModelName("added"),
            source="added",
            path=str(path),
            dtype="float32",
            max_model_len=_MAX_MODEL_LEN,
        )
        self.began_s, self.load_s = time.monotonic(), None
        if snapshot is None:
            self.channel.send(m.LoadModel(model))
        else:
            _, digest, self_check = snapshot
            order = m.LoadModel(model, True, digest, self_check=self_check)
            self.channel.send(order, (snapshot.fd,))

    def stream(
        self, path: Path | None = None, at: int = 0, snapshot: Snapshot | None = None
    ) -> tuple[list[int], float]:
        """Return the tokens of a stream and its longest pause; a model is added at a token."""
        request_id = f"stream {time.monotonic()}"
        self.ask("stream", request_id, _PROMPT, max_tokens=_NUM_TOKENS, ignore_eos=True)
        tokens, times_s = self.tokens[request_id], list[float]()
        while request_id not in self.ended:
            num_before = len(tokens)
            self.pump(1.0)
            if len(tokens) > num_before:
                times_s.append(time.monotonic())
            if path is not None and len(tokens) >= at:
                self.add(path, snapshot)
                path = None
        assert self.ended[request_id] == "length", self.ended[request_id]
        return tokens, max(later - earlier for earlier, later in pairwise(times_s))

    def remove(self) -> float:
        """Wait for the end of the load, remove the model and return the time of the load."""
        while self.load_s is None:
            self.pump(1.0)
        self.channel.send(m.UnloadModel("added"))
        self.wait(m.ModelUnloaded)
        return self.load_s

    def _note(self, message: m.FromWorker) -> None:
        super()._note(message)
        assert not isinstance(message, m.ModelFailed), message
        if self.began_s is not None and isinstance(message, m.ModelLoaded):
            self.load_s = time.monotonic() - self.began_s
            os.close(self.channel.take_fd())


def run(
    size: float, paths: dict[str, Path], num_trials: int, chance: random.Random
) -> Iterator[Trial]:
    """Yield the trials on a device for ``size`` models, all kinds in turn."""
    card = Card(int(size * weight_bytes(paths["llama"])))
    try:
        card.load("stream", paths["llama"], max_model_len=_MAX_MODEL_LEN)
        card.load("added", paths["qwen3"], max_model_len=_MAX_MODEL_LEN)
        card.began_s, card.load_s = 0.0, 0.0
        card.remove()
        expected, _ = card.stream()
        for number in range(num_trials):
            kind = list(KINDS)[number % len(KINDS)]
            given = card.snapshots["added"] if kind == "snapshot" else None
            _, alone_pause_s = card.stream()
            at = chance.randrange(1, _NUM_TOKENS // 4)
            tokens, pause_s = card.stream(paths[KINDS[kind]], at, given)
            is_exact = tokens == expected
            yield Trial(size, kind, is_exact, alone_pause_s, pause_s, card.remove())
    finally:
        card.close()


if __name__ == "__main__":
    sys.exit(main())
