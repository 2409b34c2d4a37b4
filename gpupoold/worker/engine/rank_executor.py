"""vLLM's executor of a group's leader: the same calls on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig

from gpupoold.memory.group.orders import OrderBook
from gpupoold.worker.engine.process_groups import distributed_init_method, seed_sampling
from gpupoold.worker.weights.loading import current_load
from gpupoold.worker.weights.rank_loads import LeaderLoad

_SEED_BITS = 62


class RankExecutor(UniProcExecutor):
    """The leader's worker in this process, the followers' workers by messages.

    During a load a call waits for the answers of all ranks. Later the followers carry out calls in
    the order of the leader's other orders, and only the leader's result counts.
    """

    def _init_executor(self) -> None:
        load = current_load()
        assert isinstance(load, LeaderLoad), "a group loads with LeaderLoad"
        self._load = load
        self._engine = load.engine
        self._orders: OrderBook = load.links.orders
        self._seed: int | None = None  # of the sampling that was ordered with its step
        load.links.send("build", self._engine, self.vllm_config)
        super()._init_executor()
        load.links.receive()

    def _distributed_args(self) -> tuple[str, int, int]:
        return distributed_init_method(), 0, 0

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        self._load.share_kv()

    def overwrite(self, span: range) -> None:
        """Order the followers to overwrite bytes of their weights, as ``tensors.spoil`` does."""
        self._orders.send("overwrite", self._engine, span)

    def close_engine(self) -> None:
        """Order the followers to free their shards."""
        self._orders.send("close_engine", self._engine)

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of the workers; return the leader's result, in a load all results."""
        assert isinstance(method, str), "followers are called by name"
        call = (self._engine, method, args, kwargs or {})
        if not self._load.is_under_way:
            if method == "execute_model":
                self._order_step(args[0])
            elif method == "sample_tokens":
                self._order_sampling(args[0])
            else:
                self._orders.send("on_shard", self._engine, "call", *call[1:])
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        self._load.links.send("call", *call)
        [own] = super().collective_rpc(method, timeout, args, kwargs)
        others = self._load.links.receive()
        return own if single_value else [own, *others]

    def _order_step(self, output: SchedulerOutput) -> None:
        """Order a step; with its sampling, unless this has to wait for the bits of grammars."""
        has_grammars = output.has_structured_output_requests
        self._seed = None if has_grammars else random.getrandbits(_SEED_BITS)
        self._orders.send("step", self._engine, output, self._seed)

    def _order_sampling(self, grammars: GrammarOutput | None) -> None:
        """Order the sampling of a step, unless ordered with the step; seed this rank's."""
        if self._seed is None:
            seed = random.getrandbits(_SEED_BITS)
            self._orders.send("sample", self._engine, grammars, seed)
        else:
            assert grammars is None, "a step without grammars has bits of grammars"
            seed, self._seed = self._seed, None
        seed_sampling(seed)
