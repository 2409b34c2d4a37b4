"""One instance of every message, with every field set to something telling."""

from __future__ import annotations

from gpupoold.domain import Priority
from gpupoold.wire import messages as m

MODEL = m.ModelToLoad(
    name="llama",
    path="/models/llama",
    dtype="bfloat16",
    max_model_len=4096,
    aliases=("l", "chat"),
    ttft_s=1.5,
    tbt_s=0.05,
    allow_remote_code=True,
)
LOADED = m.LoadedModel(
    name="llama",
    architecture="LlamaForCausalLM",
    max_model_len=4096,
    dtype="bfloat16",
    block_size=32,
    num_gpu_blocks=1000,
    weight_bytes=1 << 33,
    kv_bytes_per_token=4096,
    supported_tasks=("generate",),
    load_s=12.25,
)
SWITCH = m.SwitchRecord(
    instance=1,
    model="llama",
    previous=None,
    at_s=10.5,
    total_s=0.75,
    evict_s=0.125,
    map_s=0.25,
    weights_s=0.25,
    kv_s=0.125,
    weight_bytes=1 << 33,
    kv_in_bytes=7,
    kv_out_bytes=8,
    prefetched_bytes=9,
)
MEMORY = m.ModelMemory(
    model="llama",
    weights_resident_bytes=0,
    weights_total_bytes=1 << 33,
    kv_resident_bytes=5,
    kv_host_bytes=6,
    num_live=2,
    num_waiting=1,
)
SERVED = m.ServedModel(
    name="llama",
    aliases=("l",),
    state="failed",
    created_at=1_700_000_000.0,
    reason="no room",
    retry_after_s=5.0,
    max_model_len=None,
)
PROGRESS = [m.RequestProgress("r1", [1, 2]), m.RequestProgress("r2", [], "stop")]

PARCEL = m.Parcel("4242-7", 1, 3, [(0, 1 << 20), (1 << 30, 512)])
LEVELS = m.KeyLevels(3.5, 4.0, -5.5)
KEY = m.KeyRecord("Ab12", "web", "d1", "d2", 1.7e9, ("a",), Priority.LOW, 60, 10_000, 1.8e9)
MESSAGES: list[m.Message] = [
    m.LoadModel(MODEL, True, "digest"),
    m.UnloadModel("llama"),
    m.DropImage("llama"),
    m.TakeImage("llama"),
    m.SetTargets("llama", 1.0, 0.25),
    m.RunTurn(7, "llama", 1.5, "qwen"),
    m.AddRequest("llama", "r1", 3.5, 300, 64, [b"", b"\x00\xff" * 40]),
    m.AddRequest("llama", "r1", 3.5, 2, 64, [b"x"], [3, 4], True, PARCEL),
    m.AddRequest("llama", "r1", 3.5, 1, 64, [b"x"], key_id="Ab12", priority=Priority.HIGH),
    m.AbortRequests("llama", ["r1", "r2"]),
    m.RunTurn(7, "llama", 1.5, None, 256),
    m.MoveOut("llama", "r1"),
    m.PeerHost(2, 1 << 31),
    m.PeerDown(2),
    m.FreeParcel("4242-7"),
    m.Moved("llama", "r1"),
    m.Moved("llama", "r1", True, PARCEL),
    m.Moved("llama", "r1", False),
    m.Adopted("llama", "r1"),
    m.ParcelUsed("4242-7", 1),
    m.Call(7, "residency", {"models": ["a"], "num": 3, "none": None, "nested": {"x": 0.5}}),
    m.CallResult(7, {"seconds": [0.5, 1.5]}, "", "", ""),
    m.CallResult(8, None, "failed", "it did not work", "try again"),
    m.Shutdown(),
    m.Fork(3, "gpupoold.instance", ["--instance", "0"], ["--wire-fd"], {"NAME": "value"}),
    m.Forked(3, 4242),
    m.ForkEnded(4242, -9),
    m.InstanceReady(1, 4242, 1 << 36, 2 << 20, 2.5e10, "0.32.0"),
    m.InstanceReady(1, 4242, 1 << 36, 2 << 20, 2.5e10, "0.32.0", "NVIDIA A10", 2 << 30),
    m.ModelLoaded(LOADED, "digest", True),
    m.ModelFailed("llama", "refused", "too large", "a larger device"),
    m.ModelUnloaded("llama"),
    m.ImageDropped("llama"),
    m.ImageTaken("llama", "no memory"),
    m.StepOutputs("llama", 5.25, [b"frame", bytes(range(256))], PROGRESS),
    m.Switched(SWITCH),
    m.AskMetrics(11),
    m.MetricsText(11, b"up 1\n"),
    m.TurnEnded(7, {"llama": 0, "qwen": 15_000_000_000}, "llama", 5.5, 6.25),
    m.WrongAnswer("qwen-7b", (1, 2), (3, 4)),
    m.InstanceStatus(1, 6.5, "llama", 0.25, 99, 1 << 30, 0, [MEMORY, MEMORY], 2, 6.25, 1 << 20),
    m.Reconfigure("debug", 1000, 10_000_000),
    m.FrontendReady(4243),
    m.ModelList([SERVED], True),
    m.ServeModel(9, MODEL, LOADED),
    m.Ping(),
    m.Pong([0.25, 0.0]),
    m.StopServing("llama"),
    m.Admission("llama", "r1"),
    m.Admission("llama", "r2", 429, "too many", 7.5),
    m.RequestsFailed("llama", ["r1"], "the worker ended"),
    m.AccessRules([KEY, m.KeyRecord("Ef34", "all", "d")], True, {"Ab12": LEVELS}),
    m.AccessReport({"Ab12": LEVELS}, 3),
]
