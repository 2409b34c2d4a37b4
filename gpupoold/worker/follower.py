"""A follower: the process of a rank other than 0, which carries out the leader's orders.

The follower's shards of engines are vLLM's workers, without a scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker import workspace
from vllm.v1.worker.worker_base import WorkerWrapperBase

from gpupoold.memory.device import Device
from gpupoold.memory.group.device import FollowerMemory
from gpupoold.memory.group.link import Link, OrderCount, RankLost, run_files, run_orders
from gpupoold.memory.pages import PagePool
from gpupoold.worker.engine.adapters import EngineAdapters, ReadAdapter, forget_slots
from gpupoold.worker.engine.vllm_process import (
    distributed_init_method,
    drop_runner,
    seed_sampling,
    start_load,
)
from gpupoold.worker.process import Rank
from gpupoold.worker.threads import HEAP
from gpupoold.worker.weights import tensors
from gpupoold.worker.weights.loading import WeightSource
from gpupoold.worker.weights.rank_loads import (
    Answer,
    AnswerKind,
    FollowerLoad,
    FollowerTurns,
    RankFailed,
)
from gpupoold.worker.weights.reading import HostLoadFails

_logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0  # after an error of a step


class Shard:
    """A follower's part of an engine."""

    def __init__(self, rank: int, load: FollowerLoad) -> None:
        self.worker: Any = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
        self.load = load
        self._adapters: EngineAdapters | None = None
        self._read: dict[int, ReadAdapter | None] = {}
        self._rank = rank
        self._workspace: Any = None

    def build(self, config: VllmConfig) -> None:
        """Load the shard as vLLM's executor does on the leader."""
        arguments = {
            "vllm_config": config,
            "local_rank": self._rank,
            "rank": self._rank,
            "distributed_init_method": distributed_init_method(),
            "is_driver_worker": False,
        }
        self.worker.init_worker(all_kwargs=[arguments])
        self.worker.init_device()
        self.worker.load_model()
        current_platform.update_block_size_for_backend(config)

    def is_loaded(self) -> None:
        """Keep the workspace manager, of which vLLM has one per process."""
        self._workspace = workspace._manager

    @property
    def _runner(self) -> Any:
        # A wrapper without a worker, of a load that ended before, looks attributes up for ever.
        return getattr(vars(self.worker).get("worker"), "model_runner", None)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the worker between two orders.

        Nobody reads a step's tokens here, so nobody waits for these to leave the device.
        """
        workspace._manager = self._workspace
        return run_method(self.worker, method, args, kwargs)

    @property
    def adapters(self) -> EngineAdapters:
        """The adapters of the loaded engine."""
        if self._adapters is None:
            self._adapters = EngineAdapters("the model", self._runner, None)
        return self._adapters

    def read_adapter(self, number: int, name: str, path: str) -> None:
        """Read an adapter into host memory, beside steps."""
        self._read[number] = self.adapters.read(number, name, path)

    def add_adapter(self, number: int) -> None:
        """Make an adapter that was read usable by steps."""
        if (adapter := self._read.pop(number)) is not None:
            self.adapters.add(adapter)

    def remove_adapter(self, number: int) -> None:
        """Forget an adapter."""
        self.adapters.remove(number)

    def close(self) -> None:
        """Free the shard; its regions are closed by orders."""
        if self._runner is not None:
            drop_runner(self._runner)
        if self._adapters is not None:
            self._adapters.close()
            forget_slots(self.load.weights_address, self.load.weights_bytes)
        self._workspace = None
        self.worker = None
        HEAP.engine_closed()


class FollowerEngines:
    """The shards by engine number, and the thread that loads shards."""

    def __init__(
        self, device: Device, memory: FollowerMemory, link: Link, rank: int, done: OrderCount
    ) -> None:
        self._device = device
        self._pool = PagePool(device.num_pages, device.table_pages)  # the leader's counts
        self._memory = memory
        self._link = link
        self._rank = rank
        self._done = done
        self._shards: dict[int, Shard] = {}
        self._ends: dict[int, threading.Timer] = {}  # of engines with a failed step
        self._loading: Shard | None = None
        self._undo = contextlib.ExitStack()
        self._turns = FollowerTurns()

    def on_shard(self, engine: int, method: str, *arguments: Any) -> None:
        """Call a method of a shard, for the threads of orders and of files."""
        getattr(self._shards[engine], method)(*arguments)

    def step(self, engine: int, output: SchedulerOutput, seed: int | None) -> None:
        """Run a step, and sample if there is a seed; for the thread of orders."""
        shard = self._shards[engine]
        with self._failing_with_leader(engine):
            if shard.call("execute_model", (output,), {}) is None and seed is not None:
                self.sample(engine, None, seed)

    def sample(self, engine: int, grammars: GrammarOutput | None, seed: int) -> None:
        """Sample the tokens of the latest step, for the thread of orders."""
        seed_sampling(seed)
        self._shards[engine].call("sample_tokens", (grammars,), {})

    @contextlib.contextmanager
    def _failing_with_leader(self, engine: int) -> Iterator[None]:
        """Survive an error of a step if the leader gives the engine up, having the same error.

        A model that vLLM cannot run on several ranks fails on all ranks in its self-check. If the
        error is this rank's alone, the leader waits for this rank, so this process ends soon.
        """
        try:
            yield
        except Exception:
            _logger.exception("a step failed")
            end = threading.Timer(_CLOSE_TIMEOUT_S, os._exit, (1,))
            end.daemon = True
            self._ends[engine] = end
            end.start()

    def hold(self) -> None:
        """Let the present load run alone, see :class:`FollowerTurns`; for the thread of orders."""
        self._turns.hold()

    def overwrite(self, engine: int, span: range) -> None:
        """Overwrite bytes of a shard's weights, for the thread of orders."""
        load = self._shards[engine].load
        tensors.spoil(self._device, load.weights_address + span.start, len(span))

    def close_engine(self, engine: int) -> None:
        """Free a shard, for the thread of orders."""
        if (end := self._ends.pop(engine, None)) is not None:
            end.cancel()
        self._shards.pop(engine).close()

    def run_loads(self) -> None:
        """Carry out the leader's messages about loads until the leader ends.

        Raises:
            RankLost: the leader has ended.
        """
        methods: dict[str, Callable[..., None]] = {
            "begin_load": self._begin,
            "build": self._build,
            "call": self._call,
            "end_load": self._end,
        }
        while True:
            (num_orders, method, arguments), fds = self._link.receive()
            self._done.wait_for(num_orders)
            if method in methods:
                methods[method](*arguments)
            for fd in fds:  # of a message for a call that has failed meanwhile
                os.close(fd)

    def _begin(self, engine: int, name: str, skips_checkpoint: bool, why_on_device: str) -> None:
        start_load(skips_checkpoint=skips_checkpoint)
        load = FollowerLoad(
            name,
            self._device,
            self._pool,
            WeightSource(skips_checkpoint=skips_checkpoint),
            why_on_device=why_on_device,
            turns=self._turns,
            link=self._link,
            memory=self._memory,
            done=self._done,
            rank=self._rank,
        )
        self._loading = self._shards[engine] = Shard(self._rank, load)
        self._undo.enter_context(load.active())

    def _build(self, engine: int, config: VllmConfig) -> None:
        self._answer(self._shards[engine].build, config)

    def _call(
        self, engine: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._answer(run_method, self._shards[engine].worker, method, args, kwargs)

    def _end(self, engine: int, is_loaded: bool) -> None:
        self._loading = None
        if is_loaded:
            self._undo.close()
            self._shards[engine].is_loaded()
        else:
            shard = self._shards.pop(engine)
            failure = RankFailed("the leader has given the load up")
            self._undo.__exit__(RankFailed, failure, None)
            shard.close()
        self._link.send(Answer(AnswerKind.ENDED))

    def _answer(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            answer = Answer(AnswerKind.VALUE, call(*arguments))
        except Exception as error:
            _logger.exception("a call of a load failed")
            fails = isinstance(error, HostLoadFails)
            kind = AnswerKind.HOST_LOAD_FAILS if fails else AnswerKind.ERROR
            answer = Answer(kind, f"{type(error).__name__}: {error}")
        self._link.send(answer)
        if self._loading is not None and self._loading.load.unexpected is not None:
            method, given = self._loading.load.unexpected
            assert method == "end_load", f"the leader sent {method} in the middle of a call"
            self._end(*given)


def follow(rank: Rank, device: Device) -> None:
    """Carry out the leader's orders until the leader ends.

    Raises:
        RankLost: the leader has ended.
        Exception: an order failed; the group cannot go on.
    """
    done = OrderCount()
    [links] = rank.links
    memory = FollowerMemory(device, rank.rank, done)
    engines = FollowerEngines(device, memory, links.loads, rank.rank, done)
    receivers = (memory, memory.regions, engines)

    def count_unpinned() -> None:
        rank.unpinned[rank.rank] = device.unpinned().num_bytes

    device.watch_unpinned(count_unpinned)
    links.orders.send((device.num_pages, *device.rank_nodes))
    for run in (engines.run_loads, lambda: run_files(links.files, receivers, done)):
        threading.Thread(target=_until_lost, args=(run,), daemon=True).start()
    run_orders(links.orders, receivers, done)


def _until_lost(run: Callable[[], Any]) -> None:
    try:
        run()
    except RankLost:
        os._exit(0)
    except BaseException:
        _logger.exception("a thread of the follower ends")
        logging.shutdown()
        os._exit(1)
