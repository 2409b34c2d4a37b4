"""Weights in host memory while vLLM loads their model, and on the device a module at a time.

vLLM prepares the weights of some modules after reading the checkpoint: quantized weights are packed
for the kernels, latent attention absorbs projections. vLLM prepares one module after the other, and
brings weights that are in host memory to the device meanwhile, because parts of a model may stay in
host memory. Here all weights are in host memory until the snapshot has them.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from gpupoold.memory import libc
from gpupoold.memory.device import Device
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.worker.weights import tensors
from gpupoold.worker.weights.reading import LEAST_BYTES, stays_as_read
from gpupoold.worker.weights.tensors import host_bytes, replace_storages, sharing, tensors_of

# A module's weights as read and as prepared, and as much again for the preparation.
_COPIES = 3
# The share of the memory beyond the weights that a load of all weights at once needs.
_SLACK_SHARE = 1 / 8


class HostWeights:
    """Storages that belong on the device and are in host memory, by address.

    ``make_room`` is called once with the bytes that the preparation of modules needs at a time.
    """

    def __init__(self, device: Device, make_room: Callable[[int], None]) -> None:
        self._device = device
        self._make_room = make_room
        self.is_unread = False
        """True if the content of large storages comes from a snapshot, and is not touched."""
        self._module_bytes = 0
        self._kind = "cpu" if device.is_host_addressable else "cuda"
        self.storages: dict[int, torch.UntypedStorage] = {}

    def hold(self, model: nn.Module, made: Collection[int]) -> None:
        """Keep the parameters of a new model in host memory, with all storages at ``made``."""
        self._keep(model, {_address(parameter) for parameter in model.parameters()} | {*made})
        for module in model.modules():
            if not stays_as_read(module):
                num_bytes = sum(parameter.nbytes for parameter in module.parameters())
                self._module_bytes = max(self._module_bytes, num_bytes)

    def move(self, model: nn.Module, targets: Callable[[int], int]) -> None:
        """Move the storages to other host memory, whose owner keeps the memory.

        ``targets`` returns the new address of a storage.
        """
        sources, self.storages = self.storages, {}

        def move(storage: torch.UntypedStorage) -> torch.Tensor:
            source, target = sources[storage.data_ptr()], targets(storage.data_ptr())
            moved = host_bytes(target, source.nbytes())
            if not self.is_unread and not libc.is_untouched(source.data_ptr(), source.nbytes()):
                moved.copy_(torch.empty(0, dtype=torch.int8).set_(source))  # type: ignore[call-overload]
            self.storages[target] = moved.untyped_storage()
            return moved

        replace_storages(sharing(model, sources), move)

    def show_on_device(self, model: nn.Module) -> None:
        """Make the tensors look as if they were on the device, where a plan finds them."""

        def show(storage: torch.UntypedStorage) -> torch.Tensor:
            return tensors.over(self._device, storage.data_ptr(), storage.nbytes())

        replace_storages(sharing(model, self.storages), show)

    @contextlib.contextmanager
    def on_device(self, module: nn.Module, _: torch.device) -> Iterator[nn.Module]:
        """Keep the weights of a module in torch's memory on the device inside the context."""
        if not self.storages or stays_as_read(module):
            yield module
            return
        if self._module_bytes:
            slack_bytes = int(_SLACK_SHARE * self._device.load_slack_bytes)
            self._make_room(_COPIES * self._module_bytes + slack_bytes)
            self._module_bytes = 0
        others = self._on_device(module) - self.storages.keys()
        replace_storages(sharing(module, self.storages), self._bring)
        yield module
        self._keep(module, self._on_device(module) - others)

    def is_untouched(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the content of a storage in host memory does not matter."""
        is_held = storage.data_ptr() in self.storages
        return is_held and self.is_unread and storage.nbytes() >= LEAST_BYTES

    def _bring(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the bytes of a storage in torch's memory on the device."""
        is_untouched = self.is_untouched(storage)
        del self.storages[storage.data_ptr()]
        if is_untouched:
            return torch.zeros(storage.nbytes(), dtype=torch.int8, device=self._kind)
        source = host_bytes(storage.data_ptr(), storage.nbytes())
        return torch.empty_like(source, device=self._kind).copy_(source)

    def _keep(self, model: nn.Module, addresses: Collection[int]) -> None:
        found = sharing(model, addresses)
        replace_storages((one for one in found if one.device.type != "cpu"), self._to_host)
        for one in found:
            self.storages[_address(one)] = one.untyped_storage()

    def _to_host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(storage.nbytes(), dtype=torch.int8, device="cpu")
        if self.is_unread and storage.nbytes() >= LEAST_BYTES:
            return made
        source = torch.empty(0, dtype=torch.int8, device=storage.device)
        return made.copy_(source.set_(storage))  # type: ignore[call-overload,no-any-return]

    def _on_device(self, module: nn.Module) -> set[int]:
        return {_address(one) for one in tensors_of(module) if one.device.type == self._kind}


class TorchRelease:
    """Pages released to torch; ``reclaim`` reclaims the pages and may be called at any time.

    vLLM builds a model in torch's memory before its weights move into gpupool's pages. On a GPU all
    memory except a small reserve is pages, so the pages needed for the weights are released to
    torch during the load and reclaimed afterwards. On an emulated device torch uses host memory,
    but a load takes as many pages from the models as on a GPU.
    """

    def __init__(self, device: Device, pool: PagePool) -> None:
        self._device = device
        self._pool = pool
        self._runs: list[PageRun] = []

    @property
    def has_pages(self) -> bool:
        """True if torch has pages."""
        return bool(self._runs)

    def release(self, num_pages: int) -> None:
        """Release ``num_pages`` more to torch, or all free pages if fewer."""
        runs = self._pool.allocate(min(num_pages, self._pool.num_free))
        self._device.release_memory(runs)
        self._runs += runs

    def drop_garbage(self, failure: BaseException | None = None) -> None:
        """Free the garbage of the load in torch's memory, before ``reclaim``.

        The frames of ``failure`` keep a failed load's tensors alive and are cleared.
        """
        if failure is not None:
            _clear_frames(failure)
        gc.collect()  # without the objects from before the load, which are frozen
        torch.cuda.empty_cache()

    def reclaim(self) -> None:
        """Reclaim the pages.

        Raises:
            CudaError: torch still has the memory; the worker should be restarted.
        """
        if not self._runs:
            return
        self._device.reclaim(self._runs)
        self._pool.free(self._runs)
        self._runs = []


def _clear_frames(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        waiting += [current.__cause__, current.__context__]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
