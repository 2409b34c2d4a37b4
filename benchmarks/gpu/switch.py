"""Duration of a daemon's switches between two models of one size, and of KV offload and restore.

Both models are loaded from one checkpoint. Limits come from plain copies made in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench.in_daemon import bench_kv, bench_switch
from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, shape_main
from gpupoold.api.client import AdminClient
from gpupoold.domain import WarmSource

_ROUNDS = 5
_KV_ROUNDS = 10
_KV_BYTES = 256 << 20
_DRY_KV_BYTES = 1 << 20
_PROMPTS = (128, 2048)
_MODES: tuple[WarmSource, ...] = ("host_cached", "prefetched", "resident")
# Memory for both models' KV, which grows by some tokens a round, and for the plain copies.
_KV_FACTOR = 8


def run(setting: Setting, shape: str) -> None:
    """Measure and report; mode by mode, so that what is done is kept."""
    kv_bytes = setting.dry_bytes(_DRY_KV_BYTES) if setting.is_dry else _KV_BYTES
    path, weight_bytes = setting.checkpoint(shape), setting.weight_bytes(shape)
    config = setting.device(int(2.2 * weight_bytes) + _KV_FACTOR * kv_bytes)
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes([shape, shape])}\n"
    config += f"kv_host = {_KV_FACTOR * kv_bytes}\n"
    names = (f"{shape}-a".lower(), f"{shape}-b".lower())
    starting = setting.daemon(config, starts_quickly=True)
    with starting as daemon, daemon.client() as client:
        for name in names:
            add_timed(setting, daemon, name, path)
        with setting.turn():
            _measure(setting, shape, client, names, kv_bytes)


def _measure(
    setting: Setting, shape: str, client: AdminClient, names: tuple[str, str], kv_bytes: int
) -> None:
    for mode in _MODES:
        _report(setting, shape, bench_switch(client, names, _ROUNDS, (mode,)), "without_kv")
    _report_kv(setting, shape, client, names, kv_bytes)
    measured = bench_switch(client, names, _ROUNDS, kv_bytes=kv_bytes)
    _report(setting, shape, measured, "with_kv")
    _report_first_tokens(setting, shape, client, names)


def switch_figures(
    shape: str, modes: Mapping[str, Any], *, is_group: bool = False
) -> dict[str, figures.Figure]:
    """The figures of some modes, as the worker measured them; the bytes are those of a GPU."""
    found: dict[str, figures.Figure] = {}
    for mode, kinds in modes.items():
        for kind, row in kinds.items():
            name = f"{shape}_{mode}_switch{'_with_kv' if kind == 'with_kv' else ''}"
            if mode == "resident":
                found[f"{name}_p99_s"] = figures.at_most(row["p99_s"], figures.RESIDENT_S)
            elif mode == "prefetched":
                found[f"{name}_p50_s"] = figures.at_most(row["p50_s"], figures.PREFETCHED_S)
            else:
                copying = row["bytes"] / row["memcpy_p50_s"]
                kv_bytes = row["kv_bytes"]
                limit_s = figures.host_cached_limit_s(row["bytes"] - kv_bytes, kv_bytes, copying)
                if is_group:
                    limit_s = figures.group_switch_limit_s(row["memcpy_p50_s"])
                found[f"{name}_p50_s"] = figures.at_most(row["p50_s"], limit_s)
                found[f"{shape}_weights_copy_bytes_per_s"] = figures.measured(copying)
    return found


def first_token_figures(shape: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, figures.Figure]:
    """The times of the first token after a switch from host memory, by the prompt's tokens."""
    return {
        f"{shape}_first_token_of_{row['prompt_tokens']}_{name}_p50_s": figures.measured(
            row[f"{name}_p50_s"]
        )
        for row in rows
        for name in ("prefill", "whole", "early")
        if f"{name}_p50_s" in row
    }


def kv_figures(shape: str, measured: Mapping[str, Any]) -> dict[str, figures.Figure]:
    """The figures of KV out and in."""
    swap, overlap = measured["kv_swap"], measured["kv_overlap"]
    limit = figures.KV_SHARE * swap["memcpy_bytes_per_s"]["device_copy"]
    return {
        f"{shape}_kv_swap_bytes_per_s": figures.at_least(swap["bytes_per_s"], limit),
        f"{shape}_kv_swap_differing_digests": figures.at_most(int(not swap["is_intact"]), 0),
        f"{shape}_kv_hidden_share": figures.at_least(overlap["hidden_share"], figures.HIDDEN_SHARE),
    }


def _report(setting: Setting, shape: str, measured: Mapping[str, Any], kind: str) -> None:
    [(mode, kinds)] = measured["modes"].items()
    row = kinds[kind]
    details = {f"{mode}_{kind}": row, "weight_bytes": measured["weight_bytes"]}
    is_group = setting.num_gpus > 1
    found = switch_figures(setting.label(shape), {mode: {kind: row}}, is_group=is_group)
    setting.report.add(found, **details)


def _report_first_tokens(
    setting: Setting, shape: str, client: AdminClient, names: tuple[str, str]
) -> None:
    rows = bench_switch(client, names, _ROUNDS, prompts=_PROMPTS)["first_tokens"]
    setting.report.add(first_token_figures(setting.label(shape), rows), first_tokens=rows)


def _report_kv(
    setting: Setting, shape: str, client: AdminClient, names: tuple[str, str], kv_bytes: int
) -> None:
    measured = bench_kv(client, names, _KV_ROUNDS, kv_bytes)
    setting.report.add(kv_figures(setting.label(shape), measured), **measured)


if __name__ == "__main__":
    sys.exit(shape_main(__doc__, run))
