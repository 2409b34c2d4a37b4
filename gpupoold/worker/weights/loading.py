"""Memory of a model that is being loaded: address ranges for weights and KV, and torch's memory.

vLLM creates its worker itself, so the worker finds the present load in this module. Loads never
overlap, because one thread makes all loads of a process. Pages are changed by the turn thread only.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Collection, Iterator
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
from gpupoold.memory.device import AddressRange, Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.kv_extents import in_whole_extents
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.memory.weights import WeightMemory
from gpupoold.units import format_bytes
from gpupoold.wire.messages import ModelToLoad
from gpupoold.worker.threads import TurnThread
from gpupoold.worker.weights import tensors
from gpupoold.worker.weights.reading import (
    at_host,
    creating,
    is_plain,
    may_be_in_place,
    reading_ahead,
)
from gpupoold.worker.weights.stages import LoadStage, StageClock
from gpupoold.worker.weights.tensors import (
    WeightLayout,
    copy_out,
    host_bytes,
    plan_layout,
    plan_slots,
    relocate,
    replace_storages,
    sharing,
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
        make_room: Callable[[int], None] = lambda num_pages: None,
        turns: TurnThread | None = None,
        stages: StageClock | None = None,
    ) -> None:
        """``turns`` is the owner of the pages; None if that is the calling thread.

        ``make_room`` evicts models until so many pages are free, if possible.
        """
        self.name = name
        self.device = device
        self._pool = pool
        self._snapshot = source.snapshot
        self._snapshot_digest = source.digest
        self._num_released_pages = num_released_pages
        self._make_room = make_room
        self.skips_checkpoint = source.skips_checkpoint
        self.turns = turns or TurnThread()
        self.stages = stages or StageClock()
        self._release = TorchRelease(device, pool)
        self.weights: WeightMemory | None = None
        self.kv_address_range: AddressRange | None = None
        self._weight_range: AddressRange | None = None
        self.layout: WeightLayout | None = None
        self.family = ""
        self.slot_bytes = 0
        self._num_weight_pages = 0
        self._in_place: frozenset[int] = frozenset()
        """The host addresses of the parameters that vLLM reads straight into the snapshot."""

    @property
    def is_in_place(self) -> bool:
        """True if the parameters are in the snapshot before vLLM reads the checkpoint."""
        return bool(self._in_place)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this load the present load inside the context; free its memory after an error."""
        _current.append(self)
        try:
            if self.device.num_ranks > 1:  # before other ranks begin
                self.turns.call(self._release_pages)
            yield
        except BaseException as error:
            self.turns.call(self._give_back)
            self._reclaim(error)
            raise
        finally:
            _current.pop()

    @contextlib.contextmanager
    def reading(self, config: VllmConfig) -> Iterator[None]:
        """Let vLLM load a model inside the context: in the snapshot, or in torch's memory.

        Memory for torch is taken from the other models' pages.
        """
        formats = (SNAPSHOT_FORMAT,) if self.skips_checkpoint else _CHECKPOINTS
        is_unread = self.skips_checkpoint or self._snapshot is None
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_ahead())
            if self.device.num_ranks == 1:
                stack.enter_context(whole_tensors())
            if is_unread and may_be_in_place(config, *formats):
                stack.enter_context(creating(config, self._place))
            elif self.device.num_ranks == 1:
                self.turns.call(self._release_pages)
            yield

    def _place(self, model: torch.nn.Module) -> None:
        """Make the parameters of a model without weights views of the snapshot."""
        empty = {
            _address(parameter)
            for parameter in model.parameters()
            if parameter.device.type == "cpu"
        }
        on_host = sharing(model, empty)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        # A model that is too large is refused when the files agree with its configuration.
        is_large = num_bytes >= self.device.num_pages * self.device.page_bytes
        if is_large or not is_plain(model):
            self.turns.call(self._release_pages)
            if not self.device.is_host_addressable:
                replace_storages(on_host, _in_torch)
            return
        made = replace_storages(on_host, self._as_on_device)
        layout = plan_layout(model)
        if self._snapshot is None:
            num_pages = -(-layout.num_bytes // self.device.page_bytes)
            with self.stages.during(LoadStage.SNAPSHOT):
                self._snapshot = self._buffer("snapshot", num_pages)
        elif self._snapshot.num_bytes < layout.num_bytes:
            raise StaleSnapshot(f"{self.name}: the snapshot has another layout")
        first = self._snapshot.address
        sources = {storage.data_ptr(): storage for storage in made}

        def place(storage: torch.UntypedStorage) -> torch.Tensor:
            address = first + layout.offsets[storage.data_ptr()]
            if self.skips_checkpoint:
                return host_bytes(address, storage.nbytes())
            return at_host(address, sources[storage.data_ptr()])

        replace_storages(on_host, place)
        self._in_place = frozenset(map(_address, on_host))

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
            copy_out(layout, snapshot.address, self.device, self._in_place)
        relocate(layout, address_range.address, self.device)
        if own is not None:
            copy_out(slots, own.address, self.device)
            relocate(slots, address_range.address + num_pages * page_bytes, self.device)
        self._reclaim()
        self._placed()

    def take_snapshot(self, model: torch.nn.Module) -> HostBuffer:
        """Return the weights of a loaded model that gets no engine, for the caller to own."""
        self.layout = layout = self._plan(model)
        num_pages = -(-layout.num_bytes // self.device.page_bytes)
        self._check_fits(layout.num_bytes, num_pages)
        snapshot, _ = self._usable_snapshot(layout, num_pages)
        copy_out(layout, snapshot.address, self.device, self._in_place)
        self._snapshot = None
        return snapshot

    def end_without_engine(self) -> None:
        """Free the model's memory after :meth:`take_snapshot`."""
        self._release.drop_garbage()
        self.turns.call(self._release.reclaim)

    def _plan(self, model: torch.nn.Module) -> WeightLayout:
        """Return the layout of a loaded model, whose parameters may be in the snapshot."""
        if not self._in_place:
            return plan_layout(model)
        assert self._snapshot is not None
        first = self._snapshot.address
        in_place = sharing(model, self._in_place)
        replace_storages(in_place, self._as_on_device)
        layout = plan_layout(model)
        if all(layout.offsets.get(address) == address - first for address in self._in_place):
            return layout
        if self.skips_checkpoint:
            raise StaleSnapshot(f"{self.name}: the snapshot has another layout")
        self.turns.call(self._release_pages)
        replace_storages(in_place, _in_torch)
        self._snapshot.close()
        self._snapshot, self._in_place = None, frozenset()
        return plan_layout(model)

    def _as_on_device(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the bytes of a storage as if they were on the device, where a plan finds them."""
        return tensors.over(self.device, storage.data_ptr(), storage.nbytes())

    def bring_weights(self) -> None:
        """Make the weights resident for phases of the load that compute, unless read in place.

        Raises:
            OutOfPages: other models have the memory.
        """
        if self.is_in_place:
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
        """Make weights that were read in place accessible inside the context, as zeros.

        The load computes there to compile, to tune kernels and to capture graphs, for which the
        values do not matter, so no pages are taken from other models.
        """
        with self._scratch(self._weight_range if self.is_in_place else None):
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
        num_bytes = (self.device.num_pages - self._num_weight_pages) * page_bytes
        return in_whole_extents(num_bytes, page_bytes, strides)

    def kv_allocation(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which vLLM's KV buffer is an address range of the pool."""
        return _KvAllocation(self)

    def make_kv(self, num_bytes: int) -> torch.Tensor:
        """Reserve the KV address range; its pages are mapped later, extent by extent."""
        assert self.kv_address_range is None, "vLLM allocates one KV buffer per model"
        num_pages = -(-num_bytes // self.device.page_bytes)
        self.kv_address_range = AddressRange(self.device, self._pool, num_pages)
        return tensors.over(self.device, self.kv_address_range.address, num_bytes)

    def _release_pages(self) -> None:
        """Release pages to torch in one job, so that no model takes the freed pages before."""
        self._make_room(self._num_released_pages)
        self._release.release(self._num_released_pages)

    def _bring_piece(self, weights: WeightMemory, num_pages: int) -> None:
        self._make_room(num_pages)
        weights.load(num_pages)

    def _take_page(self) -> list[PageRun]:
        self._make_room(1)
        return self._pool.allocate(1)

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
        self._snapshot = self._buffer("snapshot", num_pages)
        return self._snapshot, True

    def _buffer(self, what: str, num_pages: int) -> HostBuffer:
        """Return new memory; of a snapshot, rank 0's part."""
        num_bytes = num_pages * self.device.page_bytes
        nodes = self.device.rank_nodes[: None if what == "snapshot" else 1]
        return HostBuffer.create(f"gpupool-{what}-{self.name}", num_bytes, nodes)

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


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _in_torch(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a copy of host memory in torch's memory on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = host_bytes(storage.data_ptr(), storage.nbytes())
    return torch.empty(storage.nbytes(), dtype=torch.int8, device=device).copy_(source)


def pages_for_torch(model: ModelToLoad, device: Device, snapshot_bytes: int = 0) -> int:
    """Return the pages to release to torch for loading ``model``.

    ``snapshot_bytes`` are the bytes of the weights where the load does not read the checkpoint.
    """
    path = Path(model.path)
    weight_bytes = snapshot_bytes or _estimate_bytes(model, path)
    if num := num_slots(model.engine):
        bits = model_dtype_bits(model.dtype)
        weight_bytes += estimate_slot_bytes(path, max_rank(model.engine), num, bits)
    num_bytes = int(weight_bytes * (1 + _SLACK_SHARE)) + device.load_slack_bytes
    return min(device.num_pages, -(-num_bytes // device.page_bytes))


def _estimate_bytes(model: ModelToLoad, path: Path) -> int:
    info = check_checkpoint(path, allow_pickle=True, allow_remote_code=model.allow_remote_code)
    return estimate_weight_bytes(info, model.dtype, model.engine)


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
        """Release ``num_pages`` to torch, or all free pages if fewer."""
        assert not self._runs, "the pages released before have not been reclaimed"
        runs = self._pool.allocate(min(num_pages, self._pool.num_free))
        self._device.release_memory(runs)
        self._runs = runs

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

        Weights that are in the snapshot stay.
        """
        if current_load().is_in_place:
            return
        folder = Path(model_config.model)
        if type(model).__module__.startswith(_BACKEND):
            loads: Any = model  # as every model of vLLM does
            late = [entry for entry in _stored(folder) if entry.name.endswith(_LATE)]
            loads.load_weights((entry.name, torch.zeros(entry.shape)) for entry in late)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if name.rpartition(".")[2] not in _KV_SCALES:
                    tensor.zero_()
        if model_config.runner == "draft" and supports_any_eagle(model):
            for stored in _stored(folder):
                # An internal function of vLLM, which records whether a drafter has own embeddings.
                process_eagle_weight(model, stored.name)


def _stored(folder: Path) -> Iterator[TensorEntry]:
    """Yield a checkpoint's tensors, from the headers of the weight files."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_tensors(file)
