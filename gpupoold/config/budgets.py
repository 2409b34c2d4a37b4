"""Budgets of host memory, worked out from the facts about a machine. Pure.

Host memory is used by the system, the processes of gpupool, requests, emulated devices, the KV host
caches and the model cache. The first four are estimated; a budget that the configuration sets is
kept; the KV host caches get a part of the rest, and the model cache gets what remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.config.sections import (
    CUDA_RESERVE_BYTES,
    GIB,
    LEAST_BYTES_IN_FLIGHT,
    LEAST_KV_HOST_BYTES,
    MemorySettings,
)
from gpupoold.errors import SettingError
from gpupoold.units import format_bytes

MIB = 2**20
MODEL_CACHE, KV_HOST, RESERVE = "memory.model_cache", "memory.kv_host", "memory.reserve"
BYTES_IN_FLIGHT = "limits.max_bytes_in_flight"

# Measured as proportional set size without a model: a daemon with its fork server, a frontend with
# its grammar checker, a worker of an emulated device. The worker of a GPU is an estimate, with the
# engines of the largest default of memory.engines.
_DAEMON_BYTES = 384 * MIB
_FRONTEND_BYTES = 192 * MIB
_WORKER_BYTES = {"emulated": 512 * MIB, "cuda": 4 * GIB, "sim": 4 * GIB}
# Host memory of an engine, an estimate, over its 172 MB of memory.engines: 0.3 GiB of objects and
# graphs, and a pinned table of all sequences' tokens (32 MiB for 64 of 131,072, 128 MiB for 256).
_HOST_BYTES_PER_ENGINE_BYTE = 2.5
# A body in a frontend, prepared images, and the encoded request in the daemon.
_COPIES_IN_FLIGHT = 3
_MOST_BYTES_IN_FLIGHT = 4 * 10**9
# The system, other programs, and page cache for reading checkpoints.
_SYSTEM_SHARE, _SYSTEM_BASE_BYTES, _MOST_SYSTEM_BYTES = 1 / 20, GIB, 32 * GIB
_MOST_SYSTEM_BASE_SHARE = 1 / 8
_KV_SHARE_OF_DEVICE, _KV_SHARE_OF_REST, _KV_SHARE_OF_NODE = 1 / 2, 1 / 4, 1 / 2
_MOST_KV_HOST_BYTES = 64 * GIB
_LEAST_MODEL_CACHE_BYTES = 256 * MIB
_NOT_USED = "simulated devices use no host memory"
_RESERVE_BASE_BYTES, _RESERVE_SHARE, _RESERVE_STEP_BYTES = 2 * GIB, 1 / 64, GIB // 4


@dataclass(frozen=True, slots=True)
class Wishes:
    """The budgets that a configuration sets, in bytes; None for those to work out.

    ``engines_bytes`` is the limit of device memory for the engines of a GPU.
    """

    model_cache_bytes: int | None = None
    kv_host_bytes: int | None = None
    reserve_bytes: int | None = None
    bytes_in_flight: int | None = None
    num_frontends: int = 2
    engines_bytes: int | None = None

    def has(self, key: str) -> bool:
        return self._by_key[key] is not None

    @property
    def _by_key(self) -> dict[str, int | None]:
        return {
            MODEL_CACHE: self.model_cache_bytes,
            KV_HOST: self.kv_host_bytes,
            RESERVE: self.reserve_bytes,
            BYTES_IN_FLIGHT: self.bytes_in_flight,
        }


@dataclass(frozen=True, slots=True)
class Part:
    """A use of host memory: ``count`` times ``each_bytes``."""

    name: str
    each_bytes: int
    count: int = 1

    @property
    def num_bytes(self) -> int:
        return self.count * self.each_bytes

    def __str__(self) -> str:
        times = "" if self.count == 1 else f"{self.count} x "
        return f"{self.name} {times}{format_bytes(self.each_bytes)}"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Budgets in bytes; ``reserve_bytes`` is None where kinds of devices differ.

    ``parts`` are all uses of host memory except the ``system_bytes``; ``reasons`` has the
    arithmetic of each budget that was worked out, by key. ``most_model_cache_bytes`` is the largest
    model cache that is accepted beside the other budgets.
    """

    model_cache_bytes: int
    kv_host_bytes: int
    reserve_bytes: int | None
    bytes_in_flight: int
    usable_bytes: int
    usable_name: str
    system_bytes: int
    parts: tuple[Part, ...]
    reasons: dict[str, str]
    most_model_cache_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def work_out(wishes: Wishes, machine: Machine) -> Budgets:
    """Return the budgets for a machine; the ``wishes`` are kept.

    Raises SettingError: the machine has too little memory for the wishes.
    """
    in_flight, why_in_flight = _bytes_in_flight(machine.usable_bytes)
    reserve, why_reserve = _reserve(machine.devices)
    reasons = {BYTES_IN_FLIGHT: why_in_flight, RESERVE: why_reserve}
    if wishes.bytes_in_flight is not None:
        in_flight = wishes.bytes_in_flight
    if wishes.reserve_bytes is not None:
        reserve = wishes.reserve_bytes
    _check_reserve(machine.devices, reserve)
    host = _HostMemory(wishes, machine, in_flight)
    kv_host, why_kv_host = host.kv_host()
    model_cache, why_model_cache = host.model_cache(kv_host)
    reasons |= {KV_HOST: why_kv_host, MODEL_CACHE: why_model_cache}
    return Budgets(
        model_cache_bytes=model_cache,
        kv_host_bytes=kv_host,
        reserve_bytes=reserve,
        bytes_in_flight=in_flight,
        usable_bytes=machine.usable_bytes,
        usable_name=host.usable_name,
        system_bytes=host.system_bytes,
        parts=tuple(host.parts(model_cache, kv_host)),
        reasons={key: text for key, text in reasons.items() if not wishes.has(key)},
        most_model_cache_bytes=host.most_model_cache_bytes(kv_host),
    )


def default_engines_bytes(budgets: Budgets) -> int:
    """Return the default limit for the engines of a GPU with all of its reserve free."""
    limit_bytes = MemorySettings().engines_for(budgets.reserve_bytes or CUDA_RESERVE_BYTES)
    assert limit_bytes is not None, "a GPU has a reserve"
    return limit_bytes


class _HostMemory:
    """The division of host memory.

    Simulated devices without a simulated host use none: their processes are small, and there are no
    weights and no KV.
    """

    def __init__(self, wishes: Wishes, machine: Machine, in_flight: int) -> None:
        """Check that the wishes and the fixed uses fit together.

        Raises SettingError: the uses exceed the memory.
        """
        self._wishes = wishes
        self._machine = machine
        self._engines = [
            device for device in machine.devices if device.kind != "sim" or machine.is_simulated
        ]
        self._fixed = tuple(self._fixed_parts(in_flight)) if self._engines else ()
        usable_bytes = machine.usable_bytes
        base_bytes = min(_SYSTEM_BASE_BYTES, int(usable_bytes * _MOST_SYSTEM_BASE_SHARE))
        self.system_bytes = min(_MOST_SYSTEM_BYTES, base_bytes + int(usable_bytes * _SYSTEM_SHARE))
        wished = list(self.parts(wishes.model_cache_bytes or 0, wishes.kv_host_bytes or 0))
        self._left_bytes = usable_bytes - sum(part.num_bytes for part in wished)
        if self._left_bytes < 0:
            raise self._too_much(wished)

    @property
    def usable_name(self) -> str:
        if self._machine.usable_bytes < self._machine.memory_bytes:
            return "the control group's limit"
        return "simulated host memory" if self._machine.is_simulated else "host memory"

    def parts(self, model_cache: int, kv_host: int) -> Iterator[Part]:
        """Yield all uses with these budgets, without uses of no bytes."""
        if self._engines:
            caches = (Part(MODEL_CACHE, model_cache), Part(KV_HOST, kv_host, len(self._engines)))
            yield from (part for part in (*caches, *self._fixed) if part.num_bytes)

    def kv_host(self) -> tuple[int, str]:
        """Return the KV host cache of a GPU, and the arithmetic."""
        if self._wishes.kv_host_bytes is not None:
            return self._wishes.kv_host_bytes, ""
        if not self._engines:
            return 0, _NOT_USED
        num_bytes, why = min(self._kv_bounds())
        return _rounded(num_bytes), why

    def model_cache(self, kv_host: int) -> tuple[int, str]:
        """Return the model cache beside a KV host cache of each GPU, and the arithmetic.

        Raises SettingError: too little is left.
        """
        if self._wishes.model_cache_bytes is not None:
            return self._wishes.model_cache_bytes, ""
        if not self._engines:
            return 0, _NOT_USED
        if self._wishes.kv_host_bytes is None:
            # The unrounded value, so that more memory never makes the model cache smaller.
            taken_bytes = min(self._kv_bounds())[0] * len(self._engines)
        else:
            taken_bytes = 0  # part of the wishes
        num_bytes = self._free_bytes - taken_bytes
        if num_bytes >= _LEAST_MODEL_CACHE_BYTES:
            return _rounded(num_bytes), self._why_model_cache(kv_host)
        if self._left_bytes - taken_bytes < _LEAST_MODEL_CACHE_BYTES:
            raise self._too_much(list(self.parts(_LEAST_MODEL_CACHE_BYTES, kv_host)))
        return _LEAST_MODEL_CACHE_BYTES, f"{self._why_model_cache(kv_host)}; this is the least"

    def most_model_cache_bytes(self, kv_host: int) -> int:
        """Return the largest model cache that is accepted beside ``kv_host``."""
        return self._machine.usable_bytes - sum(part.num_bytes for part in self.parts(0, kv_host))

    @property
    def _free_bytes(self) -> int:
        """Bytes to divide: what the wishes, the fixed uses and the system leave."""
        return max(0, self._left_bytes - self.system_bytes)

    def _kv_bounds(self) -> Iterator[tuple[int, str]]:
        """Yield the bounds of a GPU's KV host cache."""
        count = len(self._engines)
        known = [engine.memory_bytes for engine in self._engines if engine.memory_bytes is not None]
        device_bytes = max(known, default=0)
        wanted_bytes = int(device_bytes * _KV_SHARE_OF_DEVICE)
        if wanted_bytes <= LEAST_KV_HOST_BYTES:
            yield LEAST_KV_HOST_BYTES, "the least for small devices"
        else:
            yield wanted_bytes, f"half of the {format_bytes(device_bytes)} of {self._one}"
        yield _MOST_KV_HOST_BYTES, f"the most for {self._one}"
        rest_bytes, what = self._free_bytes, "all that memory.model_cache leaves"
        if self._wishes.model_cache_bytes is None:
            rest_bytes, what = int(rest_bytes * _KV_SHARE_OF_REST), "a quarter of what is left"
        yield rest_bytes // count, f"{what}, {format_bytes(rest_bytes)}, over {self._count(count)}"
        for node, num_gpus in Counter(engine.node for engine in self._engines).items():
            if node is not None and (node_bytes := self._machine.node_bytes.get(node)):
                share_bytes = int(node_bytes * _KV_SHARE_OF_NODE)
                what = f"half of the {format_bytes(node_bytes)} of NUMA node {node}"
                yield share_bytes // num_gpus, f"{what}, over {self._count(num_gpus)}"

    @property
    def _has_groups(self) -> bool:
        return len({engine.device for engine in self._engines}) < len(self._engines)

    @property
    def _one(self) -> str:
        return "a GPU" if self._has_groups else "a device"

    def _count(self, count: int) -> str:
        """Name a number of devices, which are GPUs where there are groups."""
        return f"{count} {'GPU' if self._has_groups else 'device'}{'' if count == 1 else 's'}"

    def _why_model_cache(self, kv_host: int) -> str:
        parts = self.parts(0, kv_host)
        less = ", ".join(map(str, (*parts, Part("system", self.system_bytes))))
        return f"{format_bytes(self._machine.usable_bytes)} of {self.usable_name} less: {less}"

    def _fixed_parts(self, in_flight: int) -> Iterator[Part]:
        workers = sum(_WORKER_BYTES[engine.kind] for engine in self._engines)
        frontends = self._wishes.num_frontends * _FRONTEND_BYTES
        yield Part("processes", _DAEMON_BYTES + frontends + workers)
        num_gpus = sum(engine.kind != "emulated" for engine in self._engines)
        yield Part("engines", self._further_engines_bytes(), num_gpus)
        yield Part("requests", _COPIES_IN_FLIGHT * in_flight)
        emulated = [
            engine.memory_bytes or 0 for engine in self._engines if engine.kind == "emulated"
        ]
        yield Part("emulated devices", sum(emulated))

    def _further_engines_bytes(self) -> int:
        """Return the host memory of a GPU's engines beyond those of the largest default."""
        covered_bytes = MemorySettings().engines_for(CUDA_RESERVE_BYTES) or 0
        limit_bytes = self._wishes.engines_bytes
        if limit_bytes is None:
            limit_bytes = MemorySettings().engines_for(self._wishes.reserve_bytes or 0) or 0
        return int(max(0, limit_bytes - covered_bytes) * _HOST_BYTES_PER_ENGINE_BYTE)

    def _too_much(self, parts: Iterable[Part]) -> SettingError:
        """Return the refusal; its key is the larger budget that the configuration sets."""
        shown = sorted(parts, key=lambda part: -part.num_bytes)
        cache_bytes = self._wishes.model_cache_bytes or 0
        kv_bytes = (self._wishes.kv_host_bytes or 0) * len(self._engines)
        if cache_bytes or kv_bytes:
            key = KV_HOST if kv_bytes > cache_bytes else MODEL_CACHE
            hint = f"lower {key}, or remove the key to have it worked out"
        else:
            key, hint = "device", "use fewer or smaller devices, or a larger machine"
        if self._machine.usable_bytes < self._machine.memory_bytes:
            hint += "; or raise the limit (MemoryMax= of the service)"
        what = (
            f"{format_bytes(sum(part.num_bytes for part in shown))} are needed "
            f"({', '.join(map(str, shown))}), but {self.usable_name} is "
            f"{format_bytes(self._machine.usable_bytes)}"
        )
        return SettingError(key, what, hint)


def _reserve(devices: Iterable[MachineDevice]) -> tuple[int | None, str]:
    """Return the memory to leave free on each device, and the arithmetic."""
    kinds = {device.kind for device in devices}
    if "cuda" not in kinds:
        return 0, "activations are in host memory" if "emulated" in kinds else "nothing to run"
    if len(kinds) > 1:
        return None, f"{format_bytes(CUDA_RESERVE_BYTES)} on GPUs, none on other devices"
    known = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    if not known:
        return CUDA_RESERVE_BYTES, "the memory of the GPUs is unknown"
    share_bytes = _RESERVE_BASE_BYTES + int(max(known) * _RESERVE_SHARE)
    num_bytes = min(CUDA_RESERVE_BYTES, -(-share_bytes // _RESERVE_STEP_BYTES) * GIB // 4)
    base, most = format_bytes(_RESERVE_BASE_BYTES), format_bytes(CUDA_RESERVE_BYTES)
    return num_bytes, f"{base} and 1/64 of {format_bytes(max(known))}, at most {most}"


def _check_reserve(devices: Iterable[MachineDevice], reserve: int | None) -> None:
    """Check that devices of a known size keep memory.

    Raises SettingError: the reserve takes all memory of a device.
    """
    for device in devices:
        has_default = reserve is None and device.kind == "cuda"
        kept_bytes = CUDA_RESERVE_BYTES if has_default else reserve or 0
        if device.memory_bytes is not None and device.memory_bytes <= kept_bytes:
            raise SettingError(
                RESERVE,
                f"{format_bytes(kept_bytes)} leaves no memory of device {device.device}, which has "
                f"{format_bytes(device.memory_bytes)}",
                "set a lower memory.reserve, or raise device.memory",
            )


def _bytes_in_flight(usable_bytes: int) -> tuple[int, str]:
    share_bytes = max(LEAST_BYTES_IN_FLIGHT, usable_bytes // 256)
    num_bytes = min(share_bytes, _MOST_BYTES_IN_FLIGHT, usable_bytes // 32)
    return (
        max(1, num_bytes // 10**6) * 10**6,
        "1/256 of host memory, from 256 MB to 4 GB, but at most 1/32",
    )


def _rounded(num_bytes: int) -> int:
    """Round down to whole units. A larger argument never gives a smaller result."""
    unit_bytes = GIB if num_bytes >= 8 * GIB else 64 * MIB if num_bytes >= 64 * MIB else MIB
    return num_bytes // unit_bytes * unit_bytes
