"""The effect of a killed device on users of a box of simulated devices under load.

Attainment is the share of tokens in time, from the daemon's record of every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.sim_devices import CappedLengths, Sent, add_models, send_all, sim_config
from gpupoold.domain import RequestRecord, Targets
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.workloads import equal_rates, poisson_workload

DEVICES = "16xH800"
NUM_MODELS = 32
TARGETS = Targets(1.0, 0.05)
LENGTHS = CappedLengths(1024, 64)
BEFORE_S = 15.0
AFTER_S = 25.0
KILL_AT_S = 20.0
# The first seconds of arrivals are not counted, because every model needs a first switch.
_ALLOWED_LOSS = 0.01


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens, and those in time."""

    tokens: int = 0
    in_time: int = 0

    @property
    def attainment(self) -> float | None:
        """Their share; None without any."""
        return self.in_time / self.tokens if self.tokens else None


def run_recovery_sim(rps: float, seed: int = 0) -> dict[str, Any]:
    """Kill the busiest worker under load; attainment of arrivals second by second."""
    box = parse_box(DEVICES)
    names = list(box_models(box, NUM_MODELS, TARGETS))
    rates = equal_rates(names, rps / NUM_MODELS)
    requests = poisson_workload(rates, KILL_AT_S + AFTER_S, LENGTHS, seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupool-")))
        daemon = stack.enter_context(private_daemon(sim_config(box), folder / "pool"))
        add_models(daemon, names, folder, TARGETS)
        sent, killed_at = asyncio.run(_send_and_kill(daemon, requests, seed))
        with daemon.client() as client:
            records = list(client.requests())
    return summary(records, killed_at) | {
        "devices": box.num_devices,
        "rps": rps,
        "requests": len(requests),
        "errors": dict(sent.errors),
    }


def summary(records: Sequence[RequestRecord], killed_at: float) -> dict[str, Any]:
    """Attainment before the kill and by second of arrival after it, and when it was back."""
    before = _share(records, killed_at - BEFORE_S, killed_at)
    seconds = [_share(records, killed_at + s, killed_at + s + 1) for s in range(int(AFTER_S))]
    wanted = (before.attainment or 0.0) - _ALLOWED_LOSS
    late = [s for s, one in enumerate(seconds) if (one.attainment or 0.0) < wanted]
    after = _share(records, killed_at + 10, killed_at + AFTER_S)
    return {
        "attainment_before": before.attainment,
        "attainment_first_10_s": _share(records, killed_at, killed_at + 10).attainment,
        "attainment_after_10_s": after.attainment,
        "recovered_after_s": late[-1] + 1 if late else 0,
        "attainment_by_second": [one.attainment for one in seconds],
    }


async def _send_and_kill(
    daemon: PrivateDaemon, requests: Sequence[Any], seed: int
) -> tuple[Sent, float]:
    sending = asyncio.create_task(send_all(daemon.http_url, requests, seed, 0.1))
    await asyncio.sleep(KILL_AT_S)
    killed_at = await asyncio.to_thread(_kill_busiest, daemon)
    return await sending, killed_at


def _kill_busiest(daemon: PrivateDaemon) -> float:
    with daemon.client() as client:
        rows = [row for row in client.ps().devices if row.pid is not None]
    busiest = max(rows, key=lambda row: row.num_requests)
    assert busiest.pid is not None
    os.kill(busiest.pid, signal.SIGKILL)
    return time.time()


def _share(records: Sequence[RequestRecord], start: float, end: float) -> Share:
    chosen = [one for one in records if start <= one.arrived_at < end]
    return Share(
        sum(one.num_output_tokens for one in chosen), sum(one.num_tokens_in_time for one in chosen)
    )
