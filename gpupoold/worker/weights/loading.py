"""Memory of a model that is being loaded: address ranges for weights and KV, and torch's memory.

vLLM creates its worker itself, so the worker finds the present load in this module. Loads never
overlap, because one thread makes all loads of a process. Pages are changed by the turn thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import supports_any_eagle
from vllm.model_executor.models.utils import process_eagle_weight

from gpupoold.checkpoints.adapter_check import estimate_slot_bytes
from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.files import TensorEntry, read_tensors
from gpupoold.checkpoints.survey import estimate_weight_bytes, model_dtype_bits
from gpupoold.engine_options.names import max_rank, num_slots
from gpupoold.errors import Refused, ServerError
from gpupoold.memory.device import AddressRange, Device, most_addressable
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.kv_extents import in_whole_extents
from gpupoold.memory.libc import check_available
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.memory.weights import WeightMemory
from gpupoold.units import format_bytes
from gpupoold.wire.messages import ModelToLoad
from gpupoold.worker.threads import TurnThread
from gpupoold.worker.weights import tensors
from gpupoold.worker.weights.reading import (
    has_drafter,
    on_host,
    prepares_itself,
    reading_ahead,
    stays_as_read,
    why_on_device,
)
from gpupoold.worker.weights.stages import StageClock
from gpupoold.worker.weights.staging import HostWeights, TorchRelease
from gpupoold.worker.weights.tensors import (
    WeightLayout,
    copy_out,
    host_bytes,
    plan_layout,
    plan_slots,
    relocate,
    replace_storages,
    tensors_of,
)
from gpupoold.worker.weights.whole_tensors import whole_tensors

# Bytes that the turn thread copies between two steps.
_PIECE_BYTES = 32 << 20

_current: list[ModelLoad] = []

# Memory beyond the weights, besides the device's ``load_slack_bytes``.
_SLACK_SHARE = 0.1

SNAPSHOT_FORMAT = "gpupool-snapshot"
# Formats whose tensors vLLM copies into the parameters.
_CHECKPOINTS = ("auto", "safetensors")

# Scales of quantized KV. vLLM also stores the scales as floats, which no snapshot contains. Without
# scales in the checkpoint, the initial values remain.
_KV_SCALES = frozenset(f"{prefix}{name}_scale" for prefix in ("", "_") for name in "qkv") | {
    "prob_scale"
}

# vLLM's Transformers backend, and the tensors that have no parameter there before they are loaded.
_BACKEND = "vllm.model_executor.models.transformers"
_LATE = "lm_head.bias"


def current_load() -> ModelLoad:
    """Return the load in progress.

    Raises:
        RuntimeError: a worker was built outside :meth:`ModelLoad.active`.
    """
    if not _current:
        raise RuntimeError("no model is being loaded: this worker class belongs to gpupool")
    return _current[-1]


class StaleSnapshot(ServerError):
    """The snapshot does not belong to the model as loaded now."""


class WeightSource(NamedTuple):
    """The source of a load's weights: a snapshot with its digest, if there is one.

    A load that ``skips_checkpoint`` takes all bytes from the snapshot.
    """

    snapshot: HostBuffer | None = None
    digest: str = ""
    skips_checkpoint: bool = False


_NO_SNAPSHOT = WeightSource()


class Sharing(NamedTuple):
    """What the next model of an engine must have in common with its model, beside the layout.

    ``family`` is empty if no other model can have the engine, for the reason in ``why_none``.
    """

    family: str = ""
    why_none: str = ""


class ModelLoad:
    """One model's memory during its load, which results in ``weights`` and the KV range.

    ``slot_bytes`` are the bytes of the adapters' slots, which follow the snapshot's bytes.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        pool: PagePool,
        source: WeightSource = _NO_SNAPSHOT,
        num_released_pages: int = 0,
        *,
        estimated_slot_bytes: int = 0,
        why_on_device: str = "",
        make_room: Callable[[int], None] = lambda num_pages: None,
        turns: TurnThread | None = None,
        stages: StageClock | None = None,
    ) -> None:
        """``turns`` is the owner of the pages; None if that is the calling thread.

        ``make_room`` evicts models until so many pages are free, if possible. ``why_on_device`` is
        the reason for reading all weights into device memory, if there is one beforehand.
        """
        self.name = name
        self.device = device
        self._pool = pool
        self._snapshot = source.snapshot
        self._snapshot_digest = source.digest
        self._num_released_pages = num_released_pages
        self._estimated_slot_bytes = estimated_slot_bytes
        self._why_on_device = why_on_device
        self._make_room = make_room
        self.skips_checkpoint = source.skips_checkpoint
        self.turns = turns or TurnThread()
        self.stages = stages or StageClock()
        self._release = TorchRelease(device, pool)
        self.weights: WeightMemory | None = None
        self.kv_address_range: AddressRange | None = None
        self._weight_range: AddressRange | None = None
        self.layout: WeightLayout | None = None
        self.sharing = Sharing()
        self.slot_bytes = 0
        self._num_weight_pages = 0
        self.host = HostWeights(device, self._release_bytes)
        self.is_on_host = False
        """True if the weights are in host memory, but for those of a module at a time."""
        self.is_in_place = False
        """True if the parameters are in the snapshot before vLLM reads the checkpoint."""
        self._populating: Future[None] | None = None
        """The allocation of the snapshot's pages beside the read."""
        self._former: HostBuffer | None = None
        """A snapshot with the weights in the wrong places."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this load the present load inside the context; free its memory after an error."""
        _current.append(self)
        try:
            yield
        except BaseException as error:
            if self._populating is not None:
                wait([self._populating])
            self.turns.call(self._give_back)
            self._reclaim(error)
            raise
        finally:
            _current.pop()

    @contextlib.contextmanager
    def reading(self, config: VllmConfig) -> Iterator[None]:
        """Let vLLM load a model inside the context: in the snapshot, or in other host memory.

        If that is not possible, then in torch's memory, taken from the other models' pages.
        """
        formats = (SNAPSHOT_FORMAT,) if self.skips_checkpoint else _CHECKPOINTS
        is_alone = not has_drafter(config)
        self.host.is_unread = self.skips_checkpoint and is_alone

        def created(model: nn.Module, made: Collection[int]) -> None:
            self._created(model, made, is_alone=is_alone)

        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_ahead())
            if config.parallel_config.world_size == 1:
                stack.enter_context(whole_tensors())
            if reason := self._why_on_device or why_on_device(config, *formats):
                self._read_on_device(reason)
            else:
                if config.lora_config is not None:
                    self._release_bytes(self._estimated_slot_bytes)
                show = self.host.show_on_device
                stack.enter_context(on_host(config, created, show, self.host.on_device))
            yield

    def _read_on_device(self, reason: str) -> None:
        """Let vLLM read the weights into memory that other models lend."""
        self.stages.why_on_device = reason
        self._release_to_torch(self._num_released_pages)

    def _created(self, model: nn.Module, made: Collection[int], *, is_alone: bool) -> None:
        """Keep the weights of a new model in host memory, in the snapshot if they stay as read."""
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        reason = ""
        if num_bytes >= self.device.num_pages * self.device.page_bytes:
            reason = "it is too large"  # and refused when the files agree with its configuration
        elif prepares_itself(model) or any(parameter.is_meta for parameter in model.parameters()):
            reason = "vLLM prepares its weights while it reads them, or all together"
        if reason := self._common_reason(reason):
            self._read_on_device(reason)
            if not self.device.is_host_addressable:
                hosted = [
                    one for one in tensors_of(model) if one.untyped_storage().data_ptr() in made
                ]
                replace_storages(hosted, _in_torch)
            return
        self.is_on_host = True
        self.host.hold(model, made)
        is_plain = is_alone and all(map(stays_as_read, model.modules()))
        if is_plain and (self.skips_checkpoint or self._snapshot is None):
            self._place(model)
        elif not self.skips_checkpoint:
            check_available(self.name, num_bytes * self.device.num_ranks)

    def _place(self, model: nn.Module) -> None:
        """Make the parameters of a model without weights views of the snapshot."""
        self.host.show_on_device(model)
        layout = plan_layout(model)
        self._snapshot = snapshot = self._snapshot_in_place(layout)
        if not self.skips_checkpoint:
            thread = ThreadPoolExecutor(1, "snapshot")
            self._populating = thread.submit(snapshot.populate)
            thread.shutdown(wait=False)
        self.is_in_place = True
        self.host.move(model, lambda address: snapshot.address + layout.offsets[address])

    def _snapshot_in_place(self, layout: WeightLayout) -> HostBuffer:
        """Return the snapshot for weights that vLLM has not read; a new one has no pages."""
        if self._snapshot is None:
            check_available(self.name, layout.num_bytes * self.device.num_ranks)
            num_pages = -(-layout.num_bytes // self.device.page_bytes)
            return self._buffer("snapshot", num_pages, is_populated=False)
        if self._snapshot.num_bytes < layout.num_bytes:
            raise StaleSnapshot(f"{self.name}: the snapshot has another layout")
        return self._snapshot

    def take_weights(self, model: torch.nn.Module) -> None:
        """Move a loaded model's weights into the address range, through the host snapshot.

        The weights are not resident afterwards; the first switch loads the weights.
        """
        slots = plan_slots(model)
        layout = self._agree(self._plan(model), slots)
        page_bytes = self.device.page_bytes
        num_pages = -(-layout.num_bytes // page_bytes)
        num_slot_pages = -(-slots.num_bytes // page_bytes)
        self._num_weight_pages = num_pages + num_slot_pages
        self._check_fits(layout.num_bytes + slots.num_bytes, self._num_weight_pages)
        snapshot, is_new = self._usable_snapshot(layout, num_pages)
        self.layout = layout
        own: HostBuffer | None = None
        if num_slot_pages:
            own = self._buffer("slots", num_slot_pages)
            self.slot_bytes = own.num_bytes
        address_range = AddressRange(self.device, self._pool, self._num_weight_pages)
        self._hold(address_range, snapshot, own)
        if is_new:
            self._copy_out(layout, snapshot)
        relocate(layout, address_range.address, self.device)
        if own is not None:
            copy_out(slots, own.address, self.device, {})
            relocate(slots, address_range.address + num_pages * page_bytes, self.device)
        self._reclaim()
        self._placed()

    def take_snapshot(self, model: torch.nn.Module) -> HostBuffer:
        """Return the weights of a loaded model that gets no engine, for the caller to own."""
        self.layout = layout = self._plan(model)
        num_pages = -(-layout.num_bytes // self.device.page_bytes)
        self._check_fits(layout.num_bytes, num_pages)
        snapshot, _ = self._usable_snapshot(layout, num_pages)
        self._copy_out(layout, snapshot)
        self._snapshot = None
        return snapshot

    def end_without_engine(self) -> None:
        """Free the model's memory after :meth:`take_snapshot`."""
        self._release.drop_garbage()
        self.turns.call(self._release.reclaim)

    def _plan(self, model: nn.Module) -> WeightLayout:
        """Return the layout of a loaded model, whose weights may be in host memory."""
        if self._populating is not None:
            self._populating.result()
        self.host.show_on_device(model)
        layout = plan_layout(model)
        if self.is_in_place:
            assert self._snapshot is not None
            first, offsets = self._snapshot.address, layout.offsets
            if any(offsets.get(at) != at - first for at in self.host.storages):
                if self.skips_checkpoint:
                    raise StaleSnapshot(f"{self.name}: the snapshot has another layout")
                self._former, self._snapshot, self.is_in_place = self._snapshot, None, False
        return layout

    def _copy_out(self, layout: WeightLayout, snapshot: HostBuffer) -> None:
        """Write a new snapshot, and free the weights elsewhere in host memory."""
        copy_out(layout, snapshot.address, self.device, self.host.storages)
        snapshot.allocate()
        if self._former is not None:
            self._former.close()
            self._former = None

    def bring_weights(self) -> None:
        """Make the weights resident for phases of the load that compute, unless read on the host.

        Raises:
            OutOfPages: other models have the memory.
        """
        if self.is_on_host:
            return
        assert self.weights is not None
        num_pages = max(1, _PIECE_BYTES // self.device.page_bytes)
        while missing := self.weights.num_missing_pages:
            self.turns.call(self._bring_piece, self.weights, min(missing, num_pages))

    @contextlib.contextmanager
    def kv_scratch(self) -> Iterator[None]:
        """Make every KV address accessible inside the context.

        Warm-up and graph capture access many blocks, and the content does not matter: one page is
        mapped at every page of the address range.
        """
        with self._scratch(self.kv_address_range):
            yield

    @contextlib.contextmanager
    def weight_scratch(self) -> Iterator[None]:
        """Make weights that were read on the host accessible inside the context, as zeros.

        The load computes there to compile, to tune kernels and to capture graphs, for which the
        values do not matter, so no pages are taken from other models.
        """
        with self._scratch(self._weight_range if self.is_on_host else None):
            yield

    @contextlib.contextmanager
    def _scratch(self, address_range: AddressRange | None) -> Iterator[None]:
        if address_range is None:
            yield
            return
        [page] = self.turns.call(self._take_page)
        runs = [page] * address_range.num_pages
        try:
            self.device.map_and_fill(address_range.address, [page], None)
            self.device.unmap(address_range.address, [page])
            self.device.map(address_range.address, runs)
            try:
                yield
            finally:
                self.device.unmap(address_range.address, runs)
        finally:
            self.turns.call(self._pool.free, [page])

    def kv_budget_bytes(self, strides: Collection[int]) -> int:
        """Return the bytes of KV of a model alone on the device.

        ``strides`` are the bytes of a block, layer by layer.
        """
        assert self.layout is not None, "weights are loaded before KV is sized"
        page_bytes = self.device.page_bytes
        wanted = self.device.num_pages - self._num_weight_pages
        num_pages = self.turns.call(most_addressable, self.device, wanted)
        return in_whole_extents(num_pages * page_bytes, page_bytes, strides)

    def kv_allocation(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which vLLM's KV buffer is an address range of the pool."""
        return _KvAllocation(self)

    def make_kv(self, num_bytes: int) -> torch.Tensor:
        """Reserve the KV address range; its pages are mapped later, extent by extent."""
        assert self.kv_address_range is None, "vLLM allocates one KV buffer per model"
        num_pages = -(-num_bytes // self.device.page_bytes)
        self.kv_address_range = AddressRange(self.device, self._pool, num_pages)
        return tensors.over(self.device, self.kv_address_range.address, num_bytes)

    def _release_bytes(self, num_bytes: int) -> None:
        num_pages = -(-num_bytes // self.device.page_bytes)
        self._release_to_torch(min(num_pages, self._num_released_pages))

    def _release_to_torch(self, num_pages: int) -> None:
        """Release pages to torch on all ranks."""
        self.turns.call(self._release_pages, num_pages)

    def _release_pages(self, num_pages: int) -> None:
        """Release pages to torch in one job, so that no model takes the freed pages before."""
        self._make_room(num_pages)
        self._release.release(num_pages)

    def _bring_piece(self, weights: WeightMemory, num_pages: int) -> None:
        self._make_room(num_pages)
        weights.load(num_pages)

    def _take_page(self) -> list[PageRun]:
        self._make_room(1)
        return self._pool.allocate(1)

    def _common_reason(self, reason: str) -> str:
        """Return why all ranks read into device memory, as one has the reason; else ""."""
        return reason

    def _agree(self, layout: WeightLayout, slots: WeightLayout) -> WeightLayout:
        """Compare the layout with the other ranks' layouts; return one with a common digest."""
        return layout

    def _hold(
        self, address_range: AddressRange, snapshot: HostBuffer, own: HostBuffer | None
    ) -> None:
        """Own the memory of the weights from now on."""
        self.weights = WeightMemory(address_range, self.device, snapshot, own)
        self._weight_range = address_range

    def _placed(self) -> None:
        """Handle that the weights are views of the address range."""

    def _usable_snapshot(self, layout: WeightLayout, num_pages: int) -> tuple[HostBuffer, bool]:
        """Return the snapshot, and whether it is new and has no more than the parameters."""
        if self._snapshot is not None and self.is_in_place and not self.skips_checkpoint:
            return self._snapshot, True
        if self._snapshot is not None and self._snapshot_digest == layout.digest:
            return self._snapshot, False
        if self.skips_checkpoint:
            raise StaleSnapshot(f"{self.name}: the snapshot has another layout")
        if self._snapshot is not None:
            self._snapshot.close()
        # Pages that weights in host memory leave are the pages of the snapshot.
        self._snapshot = self._buffer("snapshot", num_pages, is_populated=not self.is_on_host)
        return self._snapshot, True

    def _buffer(self, what: str, num_pages: int, *, is_populated: bool = True) -> HostBuffer:
        """Return new memory; of a snapshot, rank 0's part."""
        name, num_bytes = f"gpupool-{what}-{self.name}", num_pages * self.device.page_bytes
        nodes = self.device.rank_nodes[: None if what == "snapshot" else 1]
        return HostBuffer.create(name, num_bytes, nodes, is_populated=is_populated)

    def _check_fits(self, weight_bytes: int, num_pages: int) -> None:
        if num_pages >= self.device.num_pages:
            device_bytes = self.device.num_pages * self.device.page_bytes
            raise Refused(
                f"{self.name}: weights of {format_bytes(weight_bytes)} leave no space for KV "
                f"on a device of {format_bytes(device_bytes)}",
                "use a smaller dtype or a larger device",
            )

    def _reclaim(self, failure: BaseException | None = None) -> None:
        if self._release.has_pages:
            self._release.drop_garbage(failure)
            self.turns.call(self._release.reclaim)

    def _give_back(self) -> None:
        if self.kv_address_range is not None:
            self.kv_address_range.close()
        if self.weights is not None:
            self.weights.close()
        elif self._snapshot is not None:
            self._snapshot.close()
        if self._former is not None:
            self._former.close()


class _KvAllocation(TorchFunctionMode):
    """A torch function mode that redirects the ``torch.zeros`` which creates the KV buffer."""

    def __init__(self, load: ModelLoad) -> None:
        super().__init__()
        self._load = load

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        is_buffer = func is torch.zeros and options.get("dtype") is torch.int8
        if is_buffer and len(args) == 1 and isinstance(args[0], int):
            return self._load.make_kv(args[0])
        return func(*args, **options)


def _in_torch(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a copy of host memory in torch's memory on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = host_bytes(storage.data_ptr(), storage.nbytes())
    return torch.empty(storage.nbytes(), dtype=torch.int8, device=device).copy_(source)


def pages_for_torch(model: ModelToLoad, device: Device, snapshot_bytes: int = 0) -> int:
    """Return the pages to release to torch for loading ``model``.

    ``snapshot_bytes`` are the bytes of the weights where the load does not read the checkpoint.
    """
    weight_bytes = snapshot_bytes or _estimate_bytes(model, Path(model.path))
    num_bytes = int((weight_bytes + estimate_slots(model)) * (1 + _SLACK_SHARE))
    return min(device.num_pages, -(-(num_bytes + device.load_slack_bytes) // device.page_bytes))


def estimate_slots(model: ModelToLoad) -> int:
    """Estimate the bytes of the slots for a model's adapters."""
    num, bits = num_slots(model.engine), model_dtype_bits(model.dtype)
    return estimate_slot_bytes(Path(model.path), max_rank(model.engine), num, bits) if num else 0


def _estimate_bytes(model: ModelToLoad, path: Path) -> int:
    info = check_checkpoint(path, allow_pickle=True, allow_remote_code=model.allow_remote_code)
    return estimate_weight_bytes(info, model.dtype, model.engine)


def register_snapshot_format() -> None:
    """Make the load format known to vLLM in this process.

    vLLM builds the model and post-processes zeros; then the snapshot replaces the result. The
    result is right if parameters, buffers and loose tensors contain everything that depends on the
    weights: :func:`gpupoold.worker.weights.tensors.loose_digest` detects other differences, and the
    self-check the rest.
    """
    register_model_loader(SNAPSHOT_FORMAT)(_SnapshotLoader)


class _SnapshotLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the snapshot replaces the checkpoint."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill all weights with zeros, so that post-processing meets no accidental infinities.

        Weights that are in the snapshot stay; large weights in host memory are not touched.
        """
        load = current_load()
        if load.is_in_place:
            return
        folder = Path(model_config.model)
        if type(model).__module__.startswith(_BACKEND):
            loads: Any = model  # as every model of vLLM does
            late = [entry for entry in _stored(folder) if entry.name.endswith(_LATE)]
            loads.load_weights((entry.name, torch.zeros(entry.shape)) for entry in late)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                is_scale = name.rpartition(".")[2] in _KV_SCALES
                if not is_scale and not load.host.is_untouched(tensor.untyped_storage()):
                    tensor.zero_()
        if model_config.runner == "draft" and supports_any_eagle(model):
            for stored in _stored(folder):
                # An internal function of vLLM, which records whether a drafter has own embeddings.
                process_eagle_weight(model, stored.name)


def _stored(folder: Path) -> Iterator[TensorEntry]:
    """Yield a checkpoint's tensors, from the headers of the weight files."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_tensors(file)
