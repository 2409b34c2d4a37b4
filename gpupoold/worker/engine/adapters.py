"""LoRA adapters of one engine, through vLLM's adapter manager.

The manager keeps all added adapters in host memory, and those of the latest steps in slots on the
device. A step that needs another adapter fills a slot while the model is resident; then the host
copy of the slots is made equal, so that a switch moves the slots like weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm.lora.lora_model import LoRAModel
from vllm.lora.ops.triton_ops import fused_moe_lora_op, utils
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from gpupoold.checkpoints.adapter_check import check_adapter_config
from gpupoold.domain import Adapter
from gpupoold.errors import Refused
from gpupoold.memory.group.device import GroupDevice
from gpupoold.memory.weights import WeightMemory

# Tables of slot addresses and shapes, by addresses; one per process, for CUDA kernels.
_TABLES: tuple[dict[tuple[int, ...], Any], ...] = (
    utils._LORA_A_PTR_DICT,
    utils._LORA_B_PTR_DICT,
    fused_moe_lora_op._LORA_PTR_DICT,
)


class ReadAdapter(NamedTuple):
    """An adapter in host memory."""

    name: str
    request: LoRARequest
    loaded: LoRAModel


@dataclass(frozen=True, slots=True)
class RankAdapters:
    """The adapters of the same engine, of number ``engine``, on the other ranks of a group."""

    engine: int
    device: GroupDevice

    def read(self, number: int, name: str, path: str) -> None:
        """Read an adapter as :meth:`EngineAdapters.read` does."""
        self.device.call_files("on_shard", self.engine, "read_adapter", number, name, path)

    def add(self, number: int) -> None:
        """Make an adapter that was read usable."""
        self.device.orders.send("on_shard", self.engine, "add_adapter", number)

    def remove(self, number: int) -> None:
        """Forget an adapter without requests."""
        self.device.orders.send("on_shard", self.engine, "remove_adapter", number)


class EngineAdapters:
    """The adapters of the engine with model runner ``runner``; none without LoRA support.

    A follower has no ``weights``: its slots are copied to the host with the leader's.
    """

    def __init__(
        self,
        model: str,
        runner: Any,
        weights: WeightMemory | None,
        ranks: RankAdapters | None = None,
    ) -> None:
        self.model = model
        self._weights = weights
        self._ranks = ranks
        self._requests: dict[int, LoRARequest] = {}
        # vLLM's worker manager of the model runner; not public, as all below.
        self._manager = getattr(runner, "lora_manager", None)
        if self._manager is not None and weights is not None:
            self._activate = self._manager.set_active_adapters
            self._manager.set_active_adapters = self._set_active_adapters

    def read(self, number: int, name: str, path: str) -> ReadAdapter | None:
        """Read the adapter in folder ``path`` into host memory; return None if present.

        May run beside steps, in another thread. ``number`` identifies the adapter on all workers;
        ``name`` is for messages.

        Raises:
            Refused: the engine does not support adapters, or cannot use this adapter.
        """
        if self._manager is None:
            raise Refused(f"the engine of {self.model} was built without adapters")
        if number in self._requests:
            return None
        if len(self._requests) >= self._manager.lora_config.max_cpu_loras:
            raise Refused(
                f"the engine of {self.model} keeps at most {len(self._requests)} adapters",
                "remove an adapter, or raise max-cpu-loras",
            )
        # The number is in the keys of cached KV: an adapter never finds KV of an earlier adapter
        # with its name.
        request = LoRARequest(str(number), number, path)
        try:
            # The folder may have another content than at its addition.
            check_adapter_config(Path(path))
            adapter = ReadAdapter(name, request, self._manager._load_adapter(request))
        except Exception as error:
            raise _unusable(name, error) from error
        if self._ranks is not None:
            self._ranks.read(number, name, path)
        return adapter

    def add(self, adapter: ReadAdapter) -> None:
        """Make an adapter usable by requests; no effect if present.

        Raises:
            Refused: the engine cannot use this adapter, or was closed.
        """
        number = adapter.request.lora_int_id
        if self._manager is None:
            raise Refused(f"the engine of {self.model} was closed")
        if number in self._requests:
            return
        try:
            self._manager._adapter_manager.add_adapter(adapter.loaded)
            self._check_fits(adapter.loaded)
        except Exception as error:
            self._manager.remove_adapter(number)
            raise _unusable(adapter.name, error) from error
        self._requests[number] = adapter.request
        if self._ranks is not None:
            self._ranks.add(number)

    def add_all(self, adapters: Iterable[Adapter]) -> dict[str, str]:
        """Add the adapters of a new engine; return the reasons for those left out, by name."""
        problems: dict[str, str] = {}
        for listed in adapters:
            try:
                if (adapter := self.read(listed.number, listed.name, listed.path)) is not None:
                    self.add(adapter)
            except Refused as error:
                problems[listed.name] = error.message
        return problems

    def remove(self, number: int) -> None:
        """Forget an adapter without requests; its slot, if any, becomes free."""
        if self._requests.pop(number, None) is not None:
            self._manager.remove_adapter(number)  # type: ignore[union-attr]
            if self._ranks is not None:
                self._ranks.remove(number)

    def resolve(self, request: EngineCoreRequest) -> None:
        """Replace the adapter in a frontend's request by the adapter of this engine.

        Raises:
            Refused: the engine does not have the adapter.
        """
        if request.lora_request is None:
            return
        known = self._requests.get(request.lora_request.lora_int_id)
        if known is None:
            raise Refused(f"{self.model} no longer has the adapter of the request")
        request.lora_request = known

    def _check_fits(self, loaded: LoRAModel) -> None:
        """Raise ValueError for weights without slots, or of other widths than their slots.

        vLLM would ignore the former, and fail in a step because of the latter.
        """
        manager = self._manager._adapter_manager  # type: ignore[union-attr]
        without = {id(layer): name for name, layer in loaded.loras.items() if "experts" not in name}
        for name, module in manager.modules.items():
            layer = manager._get_lora_layer_weights(loaded, name)
            without.pop(id(layer), None)
            if layer is None or not isinstance(module.lora_a_stacked, tuple):
                continue
            degree = getattr(module, "tp_size", 1)
            for slots, weights, shard_of, axis in (
                (module.lora_a_stacked, layer.lora_a, "slice_lora_a", -1),
                (module.lora_b_stacked, layer.lora_b, "slice_lora_b", -2),
            ):
                shards = getattr(module, shard_of)(weights) if degree > 1 else weights
                for slot, part, shard in zip(slots, _parts(weights), _parts(shards), strict=False):
                    width = slot.shape[axis]
                    if part is not None and (
                        shard.shape[axis] != width or part.shape[axis] > width * degree
                    ):
                        raise ValueError(
                            f"{name} has the width {width * degree}, not {part.shape[axis]}"
                        )
        if without:
            raise ValueError(f"the engine has no slots for {next(iter(without.values()))}")

    def close(self) -> None:
        """Drop the manager, and the entries of this engine in vLLM's tables.

        The next model may have slots of other shapes at the same addresses.
        """
        if self._manager is None:
            return
        self._manager = None
        if self._weights is not None:
            forget_slots(self._weights.address, self._weights.num_bytes)

    def _set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        slots = self._manager._adapter_manager.lora_index_to_id  # type: ignore[union-attr]
        before = list(slots)
        self._activate(requests, mapping)
        if self._manager._adapter_manager.lora_index_to_id != before:  # type: ignore[union-attr]
            assert self._weights is not None
            self._weights.write_back()


def forget_slots(address: int, num_bytes: int) -> None:
    """Drop the entries of slots in a range of addresses from vLLM's tables."""
    for table in _TABLES:
        for key in [key for key in table if any(0 <= at - address < num_bytes for at in key)]:
            del table[key]


def _parts(weights: Any) -> list[Any]:
    return weights if isinstance(weights, list) else [weights]


def _unusable(name: str, error: Exception) -> Refused:
    return Refused(f"{name}: vLLM cannot use the adapter: {error}")
