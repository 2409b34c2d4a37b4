"""Time of a switch by the place of the model's bytes, with the limit of each mode."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.in_worker import figures
from benchmarks.in_worker.first_token import bench_first_tokens
from benchmarks.in_worker.idle import crowded, empty_device
from benchmarks.in_worker.live import BenchmarkRequests
from gpupoold.domain import SWITCH_STAGES, WarmSource
from gpupoold.errors import Failed, Refused, UsageError
from gpupoold.memory import libc
from gpupoold.memory.kv_extents import Place
from gpupoold.wire.messages import SwitchRecord

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine
    from gpupoold.worker.turns.loop import TurnLoop

MODES: tuple[WarmSource, ...] = get_args(WarmSource)
# Uncounted switches, which access pages and caches for the first time.
_WARM_UP = 2
# Factor for resident switches, which are short and limited in the slowest of a hundred.
_RESIDENT_FACTOR = 25
_POLL_S = 0.0005
_PREFETCH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Switch:
    """A measured switch. ``ready_s``: a request can run; ``total_s``: all KV has arrived too.

    ``record`` is None if the model was resident.
    """

    ready_s: float
    total_s: float
    record: SwitchRecord | None
    kv_in_bytes: int
    first_step_s: float | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that moved out and in during the measured time."""
        return self.kv_in_bytes + (self.record.kv_out_bytes if self.record else 0)

    @property
    def num_bytes(self) -> int:
        """All bytes that moved during the measured time."""
        return (self.record.weight_bytes if self.record else 0) + self.kv_bytes


def bench_switch(
    loop: TurnLoop,
    models: list[str],
    rounds: int,
    modes: list[str],
    kv_bytes: int,
    prompts: Sequence[int] = (),
) -> dict[str, Any]:
    """Time switches between two models of an idle device, mode by mode.

    ``resident``: both models are on the device. ``prefetched``: the next model comes in while the
    other runs, then the switch is timed. ``host_cached``: the switch is timed, which evicts the
    other model, because only one fits into the pages left. Each mode runs without KV and, with
    ``kv_bytes``, with live requests of both models that have at least that much KV. Plain copies of
    the weights are made in between. Last, the first token of prompts of ``prompts`` tokens is timed
    after a switch, see :mod:`.first_token`.

    Raises:
        Refused: the device is busy, or too small for a mode; or a prompt is too long.
        UsageError: a mode is unknown.
    """
    if unknown := sorted(set(modes) - set(MODES)):
        raise UsageError(f"no switch mode {unknown[0]!r}", f"choose of {', '.join(MODES)}")
    first, second = (loop.engine(name) for name in models)
    empty_device(loop)
    bench = _SwitchBench(loop, (first, second), rounds)
    bench.check_fits(modes, kv_bytes)
    measured: dict[str, dict[str, Any]] = {mode: {} for mode in modes}
    for mode in modes:
        measured[mode]["without_kv"] = bench.measure(mode)
    if kv_bytes:
        with bench.live_kv(kv_bytes):
            for mode in modes:
                measured[mode]["with_kv"] = bench.measure(mode)
    bench.judge(measured)
    first_tokens = bench_first_tokens(loop, (first, second), rounds, prompts)
    return {"weight_bytes": bench.weight_bytes, "modes": measured, "first_tokens": first_tokens}


class _SwitchBench:
    """Two engines taking turns, and plain copies of their weights in between."""

    def __init__(
        self, loop: TurnLoop, engines: tuple[ModelEngine, ModelEngine], rounds: int
    ) -> None:
        self._loop = loop
        self._residency = loop.residency
        self._engines = engines
        self._rounds = rounds
        self._live: dict[str, BenchmarkRequests] = {}
        self._copies_s: list[float] = []  # by the device's own copy
        self._memcpys_s: list[float] = []  # by one thread, if the CPU copies
        self.weight_bytes = max(engine.weights.num_bytes for engine in engines)

    def check_fits(self, modes: Sequence[str], kv_bytes: int) -> None:
        """Check that both models fit on the device together, if a mode needs both there.

        Raises:
            Refused: the models do not fit.
        """
        page_bytes, num_pages = self._loop.own.device.page_bytes, self._residency.pool.num_pages
        wanted = sum(e.weights.num_pages + -(-kv_bytes // page_bytes) for e in self._engines)
        if wanted > num_pages and set(modes) & {"resident", "prefetched"}:
            raise Refused(
                f"both models together need {wanted} pages, the device has {num_pages}",
                "choose smaller models, a larger device, or the mode host_cached alone",
            )

    @contextlib.contextmanager
    def live_kv(self, kv_bytes: int) -> Iterator[None]:
        """Keep requests of both models live inside the context."""
        try:
            for engine in self._engines:
                live = BenchmarkRequests(engine, self._residency, kv_bytes)
                self._live[engine.name] = live
                live.start()
            yield
        finally:
            for live in self._live.values():
                live.stop()
            self._live.clear()

    def measure(self, mode: str) -> dict[str, Any]:
        """Measure the switches of one mode; the verdict needs the copies of the whole run."""
        factor = _RESIDENT_FACTOR if mode == "resident" else 1
        switches: list[_Switch] = []
        for index in range(_WARM_UP + 2 * self._rounds * factor):
            incoming, outgoing = self._engines[index % 2], self._engines[(index + 1) % 2]
            _PREPARE[mode](self, incoming, outgoing)
            is_crowded = mode == "host_cached"
            with crowded(self._loop, incoming) if is_crowded else contextlib.nullcontext():
                switch = self._timed(incoming)
            if index // 2 % factor == 0:  # a token per round, else the KV would outgrow the device
                switch = replace(switch, first_step_s=self._step(incoming))
            if index >= _WARM_UP:
                switches.append(switch)
                if is_crowded:
                    self._copy_plainly(incoming)
        return _summary(switches)

    def judge(self, measured: dict[str, dict[str, Any]]) -> None:
        """Add each mode's limit, and the time of a plain copy of the same bytes."""
        for mode, rows in measured.items():
            for row in rows.values():
                if mode == "resident":
                    row |= figures.at_most(row["p99_s"], figures.RESIDENT_P99_S, "p99_s")
                elif mode == "prefetched":
                    row |= figures.at_most(row["p50_s"], figures.PREFETCHED_P50_S, "p50_s")
                else:
                    copying = figures.bandwidth(self.weight_bytes, self._copies_s)
                    memcpy = figures.bandwidth(self.weight_bytes, self._memcpys_s)
                    kv_bytes = row["kv_bytes"]
                    limit_s = figures.host_cached_limit_s(
                        row["bytes"] - kv_bytes, kv_bytes, copying, memcpy
                    )
                    row |= figures.at_most(row["p50_s"], limit_s, "p50_s")
                    row |= {"memcpy_p50_s": row["bytes"] / copying}

    def prepare_resident(self, incoming: ModelEngine, outgoing: ModelEngine) -> None:
        """Make both models resident, and sleep for a moment, as between two turns.

        The kernel preempts a thread that never sleeps, now and then in the middle of a switch.
        """
        self._bring(incoming)
        self._bring(outgoing)
        time.sleep(_POLL_S)

    def prepare_prefetched(self, incoming: ModelEngine, outgoing: ModelEngine) -> None:
        """Prefetch the next model completely during the other model's turn."""
        self._bring(outgoing)
        self._residency.page_out(incoming.name)
        self._residency.prefetch(incoming.name, outgoing.name)
        deadline_s = time.monotonic() + _PREFETCH_TIMEOUT_S
        while self._residency.missing_bytes(incoming.name) or _is_arriving(incoming):
            if time.monotonic() > deadline_s:
                raise Failed(f"{incoming.name} was not prefetched while {outgoing.name} ran")
            self._residency.advance(outgoing.name)
            if self._step(outgoing) is None:
                time.sleep(_POLL_S)

    def prepare_host_cached(self, incoming: ModelEngine, outgoing: ModelEngine) -> None:
        """Keep only the running model on the device."""
        self._bring(outgoing)
        self._residency.page_out(incoming.name)

    def _timed(self, incoming: ModelEngine) -> _Switch:
        arrived_bytes = incoming.kv.arrived_bytes
        started_s = time.perf_counter()
        record = self._loop.switch_to(incoming.name)
        ready_s = time.perf_counter()
        self._residency.bring_all(incoming.name)
        total_s = time.perf_counter()
        return _Switch(
            ready_s=ready_s - started_s,
            total_s=total_s - started_s,
            record=record,
            kv_in_bytes=incoming.kv.arrived_bytes - arrived_bytes,
        )

    def _bring(self, engine: ModelEngine) -> None:
        self._residency.make_resident(engine.name)

    def _step(self, engine: ModelEngine) -> float | None:
        """Run a step and return its seconds; None without requests, or if a request would end."""
        live = self._live.get(engine.name)
        return live.step() if live is not None and live.can_step else None

    def _copy_plainly(self, engine: ModelEngine) -> None:
        """Copy the snapshot into its mapped address range in each way, and record the times."""
        weights, device = engine.weights, self._loop.own.device
        started_s = time.perf_counter()
        device.copy_in(weights.address, weights.snapshot.address, weights.num_bytes)
        device.synchronize()
        device.wait_for_ranks()
        self._copies_s.append(time.perf_counter() - started_s)
        if not device.has_link and device.num_ranks == 1:
            started_s = time.perf_counter()
            libc.memcpy(weights.address, weights.snapshot.address, weights.num_bytes)
        self._memcpys_s.append(time.perf_counter() - started_s)


_PREPARE: dict[str, Callable[[_SwitchBench, ModelEngine, ModelEngine], None]] = {
    "resident": _SwitchBench.prepare_resident,
    "prefetched": _SwitchBench.prepare_prefetched,
    "host_cached": _SwitchBench.prepare_host_cached,
}


def _is_arriving(engine: ModelEngine) -> bool:
    return engine.weights.num_arriving > 0 or bool(engine.kv.index.extents(Place.ARRIVING))


def _summary(switches: Sequence[_Switch]) -> dict[str, Any]:
    steps_s = [switch.first_step_s for switch in switches if switch.first_step_s is not None]
    stages = {
        f"{stage}_s": figures.p50([_stage_s(switch, stage) for switch in switches])
        for stage in SWITCH_STAGES
    }
    summary = figures.times([switch.total_s for switch in switches]) | {
        "ready_p50_s": figures.p50([switch.ready_s for switch in switches]),
        "bytes": figures.p50([switch.num_bytes for switch in switches]),
        "kv_bytes": figures.p50([switch.kv_bytes for switch in switches]),
        "stages_p50_s": stages,
    }
    if steps_s:
        summary["first_step_p50_s"] = figures.p50(steps_s)
    return summary


def _stage_s(switch: _Switch, stage: str) -> float:
    """Return the seconds of a stage.

    KV includes the wait for all KV, or weights the wait for all weights.
    """
    seconds: float = getattr(switch.record, f"{stage}_s", 0.0)  # 0 without a record
    is_early = switch.record is not None and switch.record.late_weight_bytes > 0
    if stage == ("weights" if is_early else "kv"):
        return seconds + switch.total_s - switch.ready_s
    return seconds
