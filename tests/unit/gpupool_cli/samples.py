"""Bodies filled with plausible values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from gpupoold.api.schemas import (
    CachedModel,
    CacheInfo,
    ConfigInfo,
    DeviceInfo,
    EffectName,
    EngineInfo,
    MachineInfo,
    ModelUsage,
    Ps,
    RequestInfo,
    SettingInfo,
    Status,
    TopModel,
    TurnInfo,
)
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.domain import Event, Folder, ModelName, Switch
from gpupoold.durations import LoadStages
from gpupoold.latency.models import StoredFit, StoredLatency

GIB = 1024**3
AT = 1_750_000_000.0
# Measured, but too slowly for a decode fit.
LATENCY = StoredLatency(
    device="NVIDIA A10",
    engine_version="0.32.0",
    dtype="bfloat16",
    measured_at=AT,
    bandwidth_bytes_per_s=50.0 * GIB,
    prefill=StoredFit("LinearPrefill", (1e-4, 0.01), 0.998, 0.031, 0.07, 9),
)


def model(name: str) -> ModelInfo:
    """A registered 7B model."""
    return ModelInfo(
        name=ModelName(name),
        source=f"org/{name}",
        path=f"/models/{name}",
        revision=None,
        dtype="bfloat16",
        max_model_len=4096,
        ttft_s=10.0,
        tbt_s=0.1,
        state="ready",
        error="",
        architecture="Qwen2ForCausalLM",
        weight_bytes=15 * GIB,
        kv_bytes_per_token=57344,
        created_at=AT,
    )


def event(event_id: int, message: str) -> Event:
    """Something that happened to a worker."""
    return Event(
        id=event_id, at=AT, level="info", kind="worker", subject="worker-0", message=message
    )


def status(http_url: str, num_models: int, state: Any) -> Status:
    """A daemon two minutes after its start."""
    return Status(
        version="0.1.0",
        engine_version="0.32.0",
        pid=4321,
        uptime_s=125.0,
        state=state,
        http_url=http_url,
        state_dir="/var/lib/gpupool",
        model_cache_bytes=15 * GIB,
        model_cache_limit_bytes=64 * GIB,
        rss_bytes=60 * 1024**2,
        num_models=num_models,
        num_live_requests=2,
        num_refused_requests=0,
        dropped_history_rows=0,
    )


def ps(models: list[ModelInfo]) -> Ps:
    """One device, and the first model measured, the others not."""
    device = DeviceInfo(
        device=0,
        kind="cuda",
        pid=4400,
        state="ready",
        device_bytes=80 * GIB,
        free_bytes=20 * GIB,
        page_bytes=2 * 1024**2,
        bandwidth_bytes_per_s=5e10,
        link_in_bytes_per_s=5.5e10,
        link_out_bytes_per_s=5.5e10,
        on_turn=models[0].name if models else None,
        quota_s=0.5,
        kv_host_bytes=0,
        kv_host_limit_bytes=64 * GIB,
        num_waiting_for_kv=0,
        num_recomputed=0,
        num_steps=1234,
        num_engines=2,
        engine_bytes=3 * GIB,
        engine_limit_bytes=4 * GIB,
    )
    usages = [usage(item, measured=index == 0) for index, item in enumerate(models)]
    return Ps(
        devices=[device],
        models=usages,
        requests=[],
        num_switches=3,
        switched_bytes=45 * GIB,
        switch_seconds={"weights": 0.9},
    )


def usage(info: ModelInfo, measured: bool) -> ModelUsage:
    """A model's row of ``ps``."""
    return ModelUsage(
        name=info.name,
        state=info.state,
        num_live=2,
        num_waiting=1,
        weights_resident_bytes=info.weight_bytes,
        weights_total_bytes=info.weight_bytes,
        kv_resident_bytes=GIB,
        kv_host_bytes=GIB,
        cached_bytes=info.weight_bytes,
        requests=10,
        completed=8,
        refused=3 if measured else 0,
        dropped=0,
        tokens=800,
        tokens_in_time=780,
        attainment=0.975 if measured else None,
        ttft_p50_s=0.4 if measured else None,
        ttft_p99_s=1.25 if measured else None,
        tbt_p50_s=0.02 if measured else None,
        tbt_p99_s=0.08 if measured else None,
        engines=[
            EngineInfo(
                device=0,
                device_bytes=GIB,
                host_bytes=GIB // 2,
                load=LoadStages(build_s=2.1, read_s=6.0, snapshot_s=6.1, check_s=0.01),
            )
        ],
    )


def top_model(usage: ModelUsage, info: ModelInfo, *, is_pinned: bool = False) -> TopModel:
    """A model's row of ``top``, resident on the only device."""
    return TopModel(
        usage=usage, ttft_s=info.ttft_s, tbt_s=info.tbt_s, is_pinned=is_pinned, devices=[0]
    )


def turn(turn_id: int, model: str) -> TurnInfo:
    """A turn of half a second after a switch that copied weights."""
    return TurnInfo(
        id=turn_id,
        device=0,
        model=model,
        began_at=AT + turn_id,
        seconds=0.5,
        num_tokens=20,
        switch_kind="weights",
        switch_s=0.34,
    )


def live_request(request_id: str, model: str) -> RequestInfo:
    """A request in the middle of its answer."""
    return RequestInfo(
        request_id=request_id,
        model=model,
        device=0,
        age_s=2.5,
        num_prompt_tokens=100,
        num_output_tokens=20,
        next_deadline_in_s=0.08,
    )


def switch(name: str, previous: str | None) -> Switch:
    """A switch that copied a model's weights."""
    return Switch(
        at=AT,
        device=0,
        model=name,
        previous=previous,
        total_s=0.34,
        evict_s=0.01,
        map_s=0.02,
        weights_s=0.3,
        kv_s=0.01,
        weight_bytes=15 * GIB,
        kv_in_bytes=0,
        kv_out_bytes=0,
    )


def cached(name: str) -> CachedModel:
    """A snapshot of a 7B model in host memory, saved too."""
    return CachedModel(
        name=name,
        state="host",
        num_bytes=15 * GIB,
        is_saved=True,
        is_pinned=False,
        num_live=2,
        last_used_at=AT,
    )


def cache(models: list[CachedModel]) -> CacheInfo:
    """A cache with room for four such snapshots, and the disk for eight."""
    return CacheInfo(
        host_bytes=sum(model.num_bytes for model in models if model.state == "host"),
        host_limit_bytes=60 * GIB,
        disk_bytes=sum(model.num_bytes for model in models if model.is_saved),
        disk_limit_bytes=120 * GIB,
        models=models,
    )


def chat_chunks(*pieces: str) -> list[str]:
    """Server-sent data of an answer of ``pieces``, its usage and its end."""
    deltas = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    usage_chunk = {"choices": [], "usage": {"completion_tokens": len(pieces)}}
    chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, *deltas, usage_chunk]
    return [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]


def machine() -> MachineInfo:
    """Of a service whose downloads go to a disk that the unit hides."""
    folder = Folder(
        key="download_dir",
        path=Path("/data/models"),
        exists=True,
        is_writable=False,
        owner=998,
        filesystem="ext4",
        free_bytes=1 << 40,
        num_bytes=0,
        hint="`systemctl edit gpupoold` with ReadWritePaths=/data/models",
    )
    return MachineInfo(
        config_path="/nowhere/gpupool.toml",
        folders=[folder],
        open_files=65536,
        processes=None,
        locked_bytes=None,
        memory_limit_bytes=1 << 30,
    )


def config() -> ConfigInfo:
    """A few keys."""
    rows: list[tuple[str, Any, Literal["file", "default"], EffectName]] = [
        ("server.host", 'a"b\x7f', "file", "restart"),
        ("server.port", 80, "default", "restart"),
        ("device[0].kind", "sim", "file", "restart"),
        ("device[0].memory", None, "default", "restart"),
        ("device[1].kind", "cuda", "file", "restart"),
        ("security.allow_pickle", True, "file", "loads"),
        ("paths.model_dirs", ["/a", "/b"], "default", "live"),
    ]
    settings = [
        SettingInfo(key=key, value=value, origin=origin, effect=effect)
        for key, value, origin, effect in rows
    ]
    return ConfigInfo(path="/etc/gpupool/gpupool.toml", settings=settings)
