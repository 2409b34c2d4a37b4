"""The whole service on simulated devices under load, compared with the simulator.

Starts a private daemon with ``--devices``, registers ``--models`` checkpoints without weights,
sends Poisson arrivals with ShareGPT lengths through the public API, and runs the simulator on the
same arrivals. Prints a JSON object; exit code 1 after any error, or if the attainments differ by
more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import module_of
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.domain import Targets
from gpupoold.errors import GpupoolError
from gpupoold.sim.boxes import DEFAULT_SHAPES, Box, SimModel, box_models, groups_text, parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.host import host_bytes, host_memory
from gpupoold.sim.lengths import Lengths, sharegpt_lengths
from gpupoold.sim.metrics import summarise
from gpupoold.sim.policies import make_policy
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload
from gpupoold.stats.histogram import percentile

MAX_MODEL_LEN = 8192
_TOKEN_IDS = range(300, 2000)
_ANSWER_TIMEOUT_S = 600.0
_LEAD_S = 1.0


@dataclass(frozen=True, slots=True)
class CappedLengths:
    """ShareGPT lengths, none above the caps."""

    max_prompt: int
    max_output: int

    def sample(self, rng: Random) -> Lengths:
        """The lengths of one more request."""
        one = sharegpt_lengths().sample(rng)
        return Lengths(
            min(one.prompt_tokens, self.max_prompt), min(one.output_tokens, self.max_output)
        )


@dataclass(slots=True)
class Sent:
    """What the client saw of all requests; of streams also when asked, with each TTFT."""

    errors: Counter[str] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    num_streamed: int = 0
    num_tokens: int = 0


def main() -> int:
    """Run it; see the module."""
    args = _parse()
    box = parse_box(args.devices)
    models = box_models(box, args.models, Targets(args.ttft, args.tbt), args.shapes)
    lengths = CappedLengths(args.max_prompt, args.max_output)
    rates = equal_rates(list(models), args.rps / args.models)
    requests = poisson_workload(rates, args.duration, lengths, args.seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupool-")))
        daemon = stack.enter_context(
            private_daemon(sim_config(box, args.policy), args.folder or folder / "pool")
        )
        targets = Targets(args.ttft, args.tbt)
        load_s = add_models(daemon, list(models), folder, targets, args.shapes)
        before = dict(_cpu_seconds(daemon))
        started_s = time.monotonic()
        sent = asyncio.run(send_all(daemon.http_url, requests, args.seed, args.streamed))
        wall_s = time.monotonic() - started_s
        cpu = {name: (now_s - before[name]) / wall_s for name, now_s in _cpu_seconds(daemon)}
        served = _served(daemon)
    row = {"devices": box.name, "groups": groups_text(box.groups), "policy": args.policy}
    row |= {"models": args.models, "rps": args.rps} | _seen(sent, requests)
    row |= served | {"simulated": simulated_on(models, box, requests, args.policy)}
    row |= {"tokens_per_s": sent.num_tokens / wall_s, "load_models_s": load_s, "wall_s": wall_s}
    row |= {"cpu_share": {name: round(share, 3) for name, share in cpu.items()}}
    difference = served["attainment"] - row["simulated"]["attainment"]
    is_good = not sent.errors and abs(difference) <= args.tolerance
    print(json.dumps(row | {"difference": difference, "ok": is_good}))
    return 0 if is_good else 1


def sim_config(box: Box, policy: str = "gpupool") -> str:
    """Configuration of a daemon with simulated devices, and host memory as the simulator's."""
    group = "" if box.tensor_parallel_size == 1 else f"{box.tensor_parallel_size}x"
    device = f"sim:{box.num_devices}x{group}{box.gpu}"
    scheduling = f'[scheduling]\npolicy = "{policy}"\n'
    host = f"[simulated_host]\nmemory = {host_bytes(box)}\n"
    return f'devices = ["{device}"]\n\n{host}\n{scheduling}\n[log]\nlevel = "warning"\n'


def add_models(
    daemon: PrivateDaemon,
    names: Sequence[str],
    folder: Path,
    targets: Targets,
    shapes: Sequence[str] = DEFAULT_SHAPES,
) -> float:
    """Register all; seconds it took. The first waits for the frontend to load vLLM."""
    paths = [make_dummy_checkpoint(folder, shape) for shape in shapes]
    started_s = time.monotonic()
    for index, name in enumerate(names):
        daemon.add_model(
            name,
            paths[index % len(paths)],
            max_model_len=MAX_MODEL_LEN,
            ttft_s=targets.ttft_s,
            tbt_s=targets.tbt_s,
        )
    return time.monotonic() - started_s


def _cpu_seconds(daemon: PrivateDaemon) -> Iterator[tuple[str, float]]:
    """CPU time of each kind of process so far; all devices together."""
    total: defaultdict[str, float] = defaultdict(float)
    process = psutil.Process(daemon.process.pid)
    for one in [process, *process.children(recursive=True), psutil.Process()]:
        module = module_of(one) or ""
        times = one.cpu_times()
        total[module if module.startswith("gpupoold") else "client"] += times.user + times.system
    yield from sorted(total.items())


def _served(daemon: PrivateDaemon) -> dict[str, Any]:
    """What the daemon itself counted."""
    with daemon.client() as client:
        now, status = client.ps(), client.status()
    tokens = sum(model.tokens for model in now.models)
    ttfts_s = [model.ttft_p50_s for model in now.models if model.ttft_p50_s is not None]
    return {
        "attainment": sum(model.tokens_in_time for model in now.models) / max(1, tokens),
        "completed": sum(model.completed for model in now.models),
        "ttft_p50_s": percentile(ttfts_s, 0.5),
        "moved_bytes": now.switched_bytes,
        "daemon_rss_bytes": status.rss_bytes,
    }


def _seen(sent: Sent, requests: Sequence[SimRequest]) -> dict[str, Any]:
    """What clients saw."""
    return {
        "requests": len(requests),
        "streamed": sent.num_streamed,
        "errors": dict(sent.errors.most_common(5)),
        "num_errors": sent.errors.total(),
        "client_ttft_p50_s": percentile(sent.ttfts_s, 0.5),
        "client_ttft_p99_s": percentile(sent.ttfts_s, 0.99),
        "client_late_p99_s": percentile(sent.late_s, 0.99),
    }


def simulated_on(
    models: Mapping[str, SimModel], box: Box, requests: Sequence[SimRequest], policy: str
) -> dict[str, Any]:
    """The simulator's word for the same arrivals."""
    end_s = requests[-1].arrival_s + _ANSWER_TIMEOUT_S
    host = host_memory(box)
    kv_host_bytes = host.kv_bytes_per_gpu * box.tensor_parallel_size
    device = BoxDevice(box.device_bytes, kv_host_bytes=kv_host_bytes)
    simulation = Simulation(models, make_policy(policy), [device] * box.num_devices, host=host)
    outcome = simulation.run(requests, end_s)
    overall = summarise(outcome.results, end_s).overall
    return {
        "attainment": overall.attainment,
        "ttft_p50_s": overall.ttft_s.p50,
        "moved_bytes": sum(device.moved_bytes for device in outcome.devices),
    }


async def send_all(
    url: str, requests: Sequence[SimRequest], seed: int, streamed_share: float
) -> Sent:
    """Send each request at its time; returns when all have been answered."""
    sent, rng = Sent(), Random(seed)
    bodies = [_body(request, rng, rng.random() < streamed_share) for request in requests]
    start_s = time.monotonic() + _LEAD_S
    host, _, port = url.removeprefix("http://").rpartition(":")
    tasks = []
    for request, (body, is_streamed) in zip(requests, bodies, strict=True):
        due_s = start_s + request.arrival_s
        if (wait_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        sent.late_s.append(time.monotonic() - due_s)
        asking = _ask(sent, host, int(port), body, request, is_streamed)
        tasks.append(asyncio.create_task(asking))
    await asyncio.gather(*tasks)
    return sent


def _body(request: SimRequest, rng: Random, is_streamed: bool) -> tuple[bytes, bool]:
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": rng.choices(_TOKEN_IDS, k=request.prompt_tokens),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
    }
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode(), is_streamed


async def _ask(
    sent: Sent, host: str, port: int, body: bytes, request: SimRequest, is_streamed: bool
) -> None:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            answer = await _exchange(host, port, body, sent, began_s if is_streamed else None)
        num_tokens = _num_tokens(answer, is_streamed)
        sent.num_tokens += num_tokens
        if num_tokens != request.output_tokens:
            sent.errors[f"{num_tokens - request.output_tokens:+} tokens"] += 1
    except (OSError, EOFError, ValueError, KeyError, IndexError, TimeoutError) as error:
        sent.errors[f"{type(error).__name__}: {error}"[:200]] += 1


async def _exchange(
    host: str, port: int, body: bytes, sent: Sent, stream_began_s: float | None
) -> bytes:
    """One request on a connection of its own; the raw body. Leaner than a client library,
    which would take more of the machine than the service."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        if stream_began_s is not None:
            sent.num_streamed += 1
            first = await reader.readuntil(b"data: ")
            sent.ttfts_s.append(time.monotonic() - stream_began_s)
            sent.asked_s.append(stream_began_s)
            answer = first + await reader.read()
        else:
            answer = await reader.read()
    finally:
        writer.close()
    if b" 200 " not in status:
        raise ValueError(f"{status!r}: {answer[:200]!r}")
    return answer


def _num_tokens(answer: bytes, is_streamed: bool) -> int:
    """Tokens of an answer, from its usage."""
    if is_streamed:
        lines = [line for line in answer.splitlines() if line.startswith((b"data: {", b"{"))]
        answer = lines[-1].removeprefix(b"data: ")
    return int(json.loads(answer)["usage"]["completion_tokens"])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="16xH800")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument(
        "--shapes", nargs="+", default=DEFAULT_SHAPES, help="dimensions of the models, in turn"
    )
    parser.add_argument("--policy", default="gpupool", help="of the daemon and the simulator")
    parser.add_argument("--rps", type=float, default=50.0, help="of all models together")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals")
    parser.add_argument("--max-prompt", type=int, default=4096, help="cap on prompt tokens")
    parser.add_argument("--max-output", type=int, default=256, help="cap on answer tokens")
    parser.add_argument("--streamed", type=float, default=0.2, help="share of streamed answers")
    parser.add_argument("--ttft", type=float, default=10.0)
    parser.add_argument("--tbt", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of attainment")
    parser.add_argument("--folder", type=Path, help="keep the daemon's state and logs here")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GpupoolError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
