"""Checks of host memory and of the budgets in it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpupoold.config.budgets import (
    BYTES_IN_FLIGHT,
    KV_HOST,
    MODEL_CACHE,
    RESERVE,
    Budgets,
)
from gpupoold.config.fitting import fitted
from gpupoold.config.machine import Machine, MachineError
from gpupoold.config.schema import Settings
from gpupoold.doctor.check import Check, fault, ok, warning
from gpupoold.doctor.facts import DaemonFacts, Facts, MemoryFacts
from gpupoold.doctor.machine import machine_of
from gpupoold.units import exact_size, format_bytes


def budgets_of(facts: Facts, settings: Settings) -> Budgets | MachineError:
    """Return the budgets that the daemon has, or the refusal of its start."""
    machine = machine_of(settings, facts.memory, facts.gpu, facts.numa.node_bytes)
    try:
        return fitted(settings, machine).budgets
    except MachineError as error:
        return error


def check_budgets(
    facts: Facts, settings: Settings, budgets: Budgets | MachineError
) -> Iterator[Check]:
    """Check that host memory holds the budgets, and show the budgets with their arithmetic."""
    if isinstance(budgets, MachineError):
        name = "groups" if budgets.key.startswith("device[") else "memory"
        yield fault(name, budgets.message, budgets.hint)
        return
    is_simulated = settings.simulated_host.memory_bytes is not None
    yield _check_use(budgets, None if is_simulated else facts.memory, facts.daemon)
    yield from _shown(budgets)
    if facts.daemon.snapshot_bytes and budgets.parts:
        yield _check_model_cache(budgets.model_cache_bytes, facts.daemon.snapshot_bytes)
    machine = machine_of(settings, facts.memory, facts.gpu, facts.numa.node_bytes)
    yield from _check_nodes(machine, budgets.kv_host_bytes)


def _check_use(budgets: Budgets, memory: MemoryFacts | None, daemon: DaemonFacts) -> Check:
    """Check the sum of the budgets; ``memory`` is None for a simulated host."""
    need_bytes, have_bytes = budgets.used_bytes, budgets.usable_bytes
    shown = ", ".join(map(str, budgets.parts))
    found = f"{format_bytes(need_bytes)} of {format_bytes(have_bytes)} may be used"
    found += f" ({shown})" if shown else ""
    if need_bytes > have_bytes - budgets.system_bytes:
        fix = f"lower {MODEL_CACHE} or {KV_HOST}"
        return warning("memory", f"{found}: little is left for other programs", fix)
    if memory and not daemon.is_running and need_bytes > memory.available_bytes:
        text = f"{found}, but only {format_bytes(memory.available_bytes)} are available now"
        return warning("memory", text, f"stop other programs, or lower {MODEL_CACHE}")
    return ok("memory", found)


def _shown(budgets: Budgets) -> Iterator[Check]:
    figures = {
        MODEL_CACHE: budgets.model_cache_bytes,
        KV_HOST: budgets.kv_host_bytes,
        RESERVE: budgets.reserve_bytes,
        BYTES_IN_FLIGHT: budgets.bytes_in_flight,
    }
    for key, num_bytes in figures.items():
        figure = "differs" if num_bytes is None else exact_size(num_bytes)
        yield ok(key, f"{figure}: {budgets.reasons.get(key, 'set in the configuration')}")


def _check_model_cache(budget_bytes: int, snapshot_bytes: int) -> Check:
    found = f"the weights snapshots of all models take {format_bytes(snapshot_bytes)}"
    found += f" of {format_bytes(budget_bytes)}"
    if snapshot_bytes > budget_bytes:
        text = f"{found}: models used least are loaded again on request"
        fix = "raise memory.model_cache, or set memory.snapshot_files to read snapshots from disk"
        return warning("model cache", text, fix)
    return ok("model cache", found)


def _check_nodes(machine: Machine, kv_host_bytes: int) -> Iterator[Check]:
    """Check that the KV host caches fit on the NUMA nodes of their GPUs."""
    for node, num_gpus in sorted(Counter(one.node for one in machine.devices).items()):
        node_bytes = machine.node_bytes.get(node) if node is not None else None
        if node_bytes is not None and num_gpus * kv_host_bytes > node_bytes:
            text = (
                f"{num_gpus} x {format_bytes(kv_host_bytes)} of {KV_HOST} exceed the "
                f"{format_bytes(node_bytes)} of node {node}: copies from other nodes are slower"
            )
            yield warning(f"numa node {node}", text, f"lower {KV_HOST}")
