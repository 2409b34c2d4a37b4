"""What the scenarios run on: a GPU, or an emulated device to try the scenarios themselves.

``GPUPOOL_GPU_TESTS_ON=emulated`` runs those that are marked ``gpu(emulated=True)`` on emulated
devices, with small models in float32, on a machine without a GPU. The fake card
(docs/internals/gpu.md) sets it to ``fake-card``: all that a GPU runs, with fewer switches, for
copies there are slow.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.rig import weight_bytes
from tests.functional.daemon_tools import child_env
from tests.functional.worker_peer import WorkerPeer

LLAMA, QWEN2, QWEN3 = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
MODELS = (LLAMA, QWEN2, QWEN3)
TAIL_LINES = 60
LONG = -1  # the seed of a long prompt
# Few sizes to capture graphs for, and small steps: a model is up in a second or two.
_ENGINE_ARGUMENTS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 1024}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is; ``checkpoint_bytes`` are counted in float32.

    One worker's device holds the weights of ``num_models`` models.
    """

    kind: str
    dtype: str
    checkpoint_bytes: int
    num_models: float
    reserve_bytes: int
    num_switches: int
    max_model_len: int
    long_prompt: int
    long_tokens: int
    page_bytes: int  # 0: the device's choice
    quota_max_s: float


_SCALES = {
    # 400 MB of weights a model: 10 ms of a fast link. The smallest pages, for models are small.
    "cuda": Scale(
        "cuda", "bfloat16", 800_000_000, 2.25, 2 << 30, 1000, 4096, 3500, 400, 2 << 20, 0.02
    ),
    # Copies by the processor: 100 ms.
    "fake-card": Scale(
        "cuda", "bfloat16", 800_000_000, 2.25, 2 << 30, 60, 4096, 3500, 400, 2 << 20, 0.1
    ),
    "emulated": Scale("emulated", "float32", 10_000_000, 2.6, 0, 60, 1200, 600, 300, 0, 0.02),
}
_ON = os.environ.get("GPUPOOL_GPU_TESTS_ON", "cuda")
SCALE = _SCALES[_ON]
HAS_KERNELS = _ON != "fake-card"
IS_GPU = SCALE.kind == "cuda"


def limit_s(seconds: float) -> float:
    """A time limit; copies and steps of the fake card take the time of a few processors."""
    return seconds if HAS_KERNELS else 3 * seconds


def engine_environment(
    *, is_compiled: bool = False, is_batch_invariant: bool = False
) -> dict[str, str]:
    """For processes with engines; they start quickly unless ``is_compiled``, as by default.

    ``is_batch_invariant``: a request's tokens do not depend on who else is in the batch.
    """
    arguments, environment = dict(_ENGINE_ARGUMENTS), {}
    if IS_GPU and not is_compiled:
        # Graphs without torch's compiler, which takes half a minute for each model, and only
        # those kernels that are wanted.
        environment["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
        arguments["kernel_config"] = {"enable_jit_warmup": False}
    if IS_GPU and is_batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    return environment | {"GPUPOOL_ENGINE_ARGUMENTS": json.dumps(arguments)}


# vLLM looks at the class of a model that it has not seen before in a process of its own, which
# takes as long as its import, and keeps what it has found on disk.
_LOOK = """
import sys
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models[sys.argv[1]].inspect_model_cls()
"""


class Checkpoints:
    """The three models' checkpoints, made at the same time; a path waits for its own.

    On a GPU, where time is short, vLLM gets to know their classes meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._makers = {name: self._make(name) for name in MODELS}
        classes = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM") if IS_GPU else ()
        self._looks = [self._run(name, [sys.executable, "-c", _LOOK, name]) for name in classes]

    def path(self, name: str) -> Path:
        """A model's folder."""
        assert self._makers[name].wait() == 0, self._log_path(name).read_text()
        return self._folder / name

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest model's weights."""
        return max(weight_bytes(self.path(name)) for name in MODELS)

    def close(self) -> None:
        """End those that are still being made."""
        for process in (*self._makers.values(), *self._looks):
            process.kill()
            process.wait()

    def _log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _make(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gpupoold.checkpoints.tiny", str(self._folder)]
        command += ["--arch", name.removeprefix("tiny-"), "--dtype", SCALE.dtype]
        return self._run(name, [*command, "--size", str(SCALE.checkpoint_bytes)])

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log_path(name).open("wb") as log:
            return subprocess.Popen(command, env=child_env(), stdout=log, stderr=log)


@dataclass(slots=True)
class Logs:
    """Log files of whatever runs at present, or did not start; a test that fails shows their
    ends."""

    paths: list[Path] = field(default_factory=list)
    failed: list[Path] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self, *paths: Path) -> Iterator[None]:
        """Inside this context these files are shown, and all ``*.log`` of those that are
        folders."""
        self.paths += paths
        try:
            yield
        except BaseException:
            self.failed += paths  # of a start: shown by the test that wanted it
            raise
        finally:
            for path in paths:
                self.paths.remove(path)

    def tails(self) -> Iterator[tuple[str, str]]:
        """The end of each."""
        paths, self.failed = [*self.paths, *self.failed], []
        for path in paths:
            for file in sorted(path.glob("**/*.log")) if path.is_dir() else [path]:
                if file.exists():
                    lines = file.read_text(errors="replace").splitlines()
                    yield f"the end of {file.name}", "\n".join(lines[-TAIL_LINES:])


LOGS = Logs()


class Box:
    """One worker and the models it has; made anew after a test in which it died or failed."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        log_path: Path,
        num_models: float,
        environment: Mapping[str, str],
    ) -> None:
        """The device holds the weights of ``num_models`` models and no more."""
        self._checkpoints = checkpoints
        # Not ``num_models`` times what has been made: it starts while they are being made.
        share = 1 if SCALE.dtype == "float32" else 2
        self.device_bytes = int(num_models * SCALE.checkpoint_bytes / share)
        with contextlib.ExitStack() as stack:
            stack.enter_context(LOGS.watching(log_path))
            self.peer = WorkerPeer(
                self.device_bytes,
                kv_host_bytes=1 << 30 if IS_GPU else 64 << 20,
                quota_max_s=SCALE.quota_max_s,
                options={
                    "--device-kind": SCALE.kind,
                    "--reserve-bytes": SCALE.reserve_bytes,
                    "--page-bytes": SCALE.page_bytes,
                    "--log-level": "info" if IS_GPU else "warning",
                },
                environment=environment,
                log_path=log_path,
            )
            self._stack = stack.pop_all()
        self._alone: dict[tuple[str, int, int], list[int]] = {}
        self._numbers = itertools.count()

    def load(self, *names: str) -> None:
        """Have these models."""
        for name in names:
            if name not in self.peer.snapshots:
                path = self._checkpoints.path(name)
                self.peer.load(
                    name,
                    path,
                    dtype=SCALE.dtype,
                    max_model_len=SCALE.max_model_len,
                    timeout_s=limit_s(90),
                )

    def ask(self, name: str, seed: int, num_tokens: int, **sampling: Any) -> str:
        """A request of its own: it finds nobody's prefix. Returns its name."""
        request_id = f"{name}-{seed}-{next(self._numbers)}"
        sampling |= {"max_tokens": num_tokens, "cache_salt": request_id}
        self.peer.ask(name, request_id, prompt(seed), **sampling)
        return request_id

    def answer(self, request_id: str) -> list[int]:
        """A request's tokens, once it has ended."""
        self.peer.run_until_ended(request_id, timeout_s=limit_s(60))
        assert self.peer.ended[request_id] == "length", self.peer.ended[request_id]
        return self.peer.tokens[request_id]

    def alone(self, name: str, seed: int, num_tokens: int) -> list[int]:
        """What a request is answered when nothing else runs."""
        key = (name, seed, num_tokens)
        if key not in self._alone:
            self._alone[key] = self.answer(self.ask(*key))
        return self._alone[key]

    def wait_for_tokens(self, request_id: str, num_tokens: int) -> None:
        """Let a request get so many tokens."""
        while len(self.peer.tokens[request_id]) < num_tokens:
            assert request_id not in self.peer.ended, self.peer.ended[request_id]
            self.peer.pump(1.0)

    def one_of_each(self, seed: int, num_tokens: int, names: Sequence[str] = MODELS) -> None:
        """Requests of models at the same time, one of each, are answered as alone.

        Every engine has the batches then that it has alone, so this holds for any kernels.
        """
        expected = {name: self.alone(name, seed, num_tokens) for name in names}
        asked = {name: self.ask(name, seed, num_tokens) for name in names}
        for name, request_id in asked.items():
            same_tokens(self.answer(request_id), expected[name], name)

    def close(self) -> None:
        """Stop the process."""
        try:
            self.peer.close()
        finally:
            self._stack.close()


def prompt(seed: int) -> list[int]:
    """Token ids that span some KV blocks, or many of them for ``LONG``."""
    rng = random.Random(seed)
    num_tokens = SCALE.long_prompt if seed == LONG else 20 + 35 * (seed % 4)
    return [rng.randrange(300, 1900) for _ in range(num_tokens)]


def same_tokens(found: Sequence[int], expected: Sequence[int], what: str) -> None:
    """Fail with the first place where two answers differ, and whether any is missing."""
    if list(found) == list(expected):
        return
    pairs = zip(found, expected, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        pytest.fail(f"{what}: {len(found)} tokens instead of {len(expected)}, else the same")
    pytest.fail(
        f"{what}: from token {at} of {len(expected)} on {list(found[at : at + 8])} instead of "
        f"{list(expected[at : at + 8])}; {len(found)} came in all"
    )


class Restarting:
    """A box that is made when it is first wanted, and anew after it has failed somebody."""

    def __init__(self, make: Callable[[], Box]) -> None:
        self._make = make
        self._box: Box | None = None

    def get(self) -> Box:
        """The box, with its process running."""
        if self._box is not None and self._box.peer.process.poll() is not None:
            self.drop()
        if self._box is None:
            self._box = self._make()
        return self._box

    def drop(self) -> None:
        """End it, whatever state it is in."""
        box, self._box = self._box, None
        if box is not None:
            box.peer.process.kill()
            with contextlib.suppress(AssertionError):
                box.close()

    def close(self) -> None:
        """Stop it in order."""
        box, self._box = self._box, None
        if box is not None:
            box.close()


def integrity(peer: WorkerPeer) -> dict[str, Any]:
    """The worker's accounts, which agree."""
    accounts: dict[str, Any] = peer.call("check_integrity")
    return accounts
