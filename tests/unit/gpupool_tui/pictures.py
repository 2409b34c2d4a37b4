"""A fixed picture: two devices, four models, in the middle of their work."""

from __future__ import annotations

from gpupool_tui.picture import Picture
from gpupoold.api.schemas import DeviceInfo, ModelUsage, RequestInfo, Top, TopModel, TurnInfo
from gpupoold.domain import Event, EventLevel
from tests.unit.gpupool_cli import samples

GIB = samples.GIB
AT = samples.AT + 60.0
MODELS = ("qwen-7b", "coder", "llama-3-8b", "tiny")


def device(number: int, **changes: object) -> DeviceInfo:
    """One of 24 GiB with a model of 15 GiB on its turn."""
    values: dict[str, object] = {
        "device": number,
        "kind": "cuda",
        "pid": 4400 + number,
        "state": "ready",
        "device_bytes": 24 * GIB,
        "free_bytes": 4 * GIB,
        "page_bytes": 2 << 20,
        "bandwidth_bytes_per_s": 2e10,
        "link_in_bytes_per_s": 2.5e10,
        "link_out_bytes_per_s": 2.4e10,
        "on_turn": "qwen-7b",
        "quota_s": 2.0,
        "kv_host_bytes": 3 * GIB,
        "kv_host_limit_bytes": 32 * GIB,
        "num_waiting_for_kv": 0,
        "num_recomputed": 0,
        "num_steps": 123_456,
        "num_requests": 5,
        "weights_bytes": 17 * GIB,
        "kv_bytes": 3 * GIB,
        "prefetched_bytes": 2 * GIB,
        "quota_used_s": 0.5,
        "quota_left_s": 1.5,
        "utilisation": 0.93,
        "temperature_c": 61.0,
        "power_w": 142.0,
    }
    return DeviceInfo.model_validate(values | changes)


def model(name: str, **changes: object) -> TopModel:
    """One that keeps to its targets, with nothing to do."""
    usage: dict[str, object] = samples.usage(samples.model(name), measured=True).model_dump()
    usage |= {
        "num_live": 0,
        "num_waiting": 0,
        "weights_resident_bytes": 0,
        "kv_resident_bytes": 0,
        "kv_host_bytes": 0,
        "tbt_p99_s": 0.045,
        "attainment_1m": None,
        "attainment_1h": 0.992,
        "attainment_minutes": [None] * 30 + [1.0] * 10 + [0.97] * 10 + [0.85] * 5 + [0.4] * 5,
    }
    return TopModel(
        usage=ModelUsage.model_validate(usage | changes),
        ttft_s=2.0,
        tbt_s=0.05,
        is_pinned=name == "coder",
        devices=[0] if name == "qwen-7b" else [],
    )


def turn(
    turn_id: int, number: int, name: str, began_s: float, seconds: float, switch_s: float = 0.4
) -> TurnInfo:
    """One that began ``began_s`` before ``AT``."""
    return TurnInfo(
        id=turn_id,
        device=number,
        model=name,
        began_at=AT - began_s,
        seconds=seconds,
        num_tokens=round(seconds * 40),
        switch_kind="weights" if switch_s else "none",
        switch_s=switch_s,
    )


def event(event_id: int, level: EventLevel, kind: str, subject: str, message: str) -> Event:
    """At one second after the other."""
    return Event(event_id, samples.AT + event_id, level, kind, subject, message)


def request(number: int, name: str, due_s: float) -> RequestInfo:
    """The older, the lower its number."""
    return RequestInfo(
        request_id=f"{number:02x}" + "5eed" * 7 + "00",
        model=name,
        device=None if name == "tiny" else number % 2,
        age_s=40.0 - 3 * number,
        num_prompt_tokens=100 * number,
        num_output_tokens=0 if name == "tiny" else 250 - 9 * number,
        next_deadline_in_s=due_s,
    )


def top(num_answers: int = 0, pid: int = 4321) -> Top:
    """The whole, ``num_answers`` seconds later than ``AT``."""
    status = samples.status("http://127.0.0.1:8000", len(MODELS), "ready")
    live = {"num_live": 4, "num_waiting": 1, "tokens_per_s": 181.3, "attainment_1m": 0.981}
    late = {"num_live": 2, "tokens_per_s": 7.25, "attainment_1m": 0.62, "attainment_1h": 0.874}
    slow = {"ttft_p50_s": 1.9, "ttft_p99_s": 8.5, "tbt_p99_s": 0.31, "state": "loading"}
    here = {"weights_resident_bytes": 15 * GIB, "kv_resident_bytes": 2 * GIB}
    nothing = dict.fromkeys(("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s"))
    return Top(
        at=AT + num_answers,
        status=status.model_copy(update={"pid": pid, "num_refused_requests": 3}),
        devices=[
            device(0),
            device(
                1,
                on_turn="coder",
                quota_used_s=0.0,
                temperature_c=88.0,
                role="decode",
                is_role_fixed=True,
                prefetched_bytes=0,
                weights_bytes=15 * GIB,
                kv_bytes=1 * GIB,
                free_bytes=8 * GIB,
            ),
        ],
        models=[
            model("coder", **late, **slow),
            model("llama-3-8b", cached_bytes=0, attainment_1h=None, **nothing),
            model("qwen-7b", **live, **here),
            model("tiny", num_live=1, num_waiting=1),
        ],
        requests=[request(i, MODELS[i % 4], 2.5 - i) for i in range(1, 8)],
        turns=[
            turn(1, 0, "qwen-7b", 24.0, 6.0),
            turn(2, 1, "coder", 23.0, 9.5, switch_s=0.0),
            turn(3, 0, "llama-3-8b", 17.0, 3.5, switch_s=1.0),
            turn(4, 0, "qwen-7b", 12.5, 8.0, switch_s=0.8),
            turn(5, 1, "tiny", 13.0, 0.9, switch_s=0.1),
            turn(6, 1, "llama-3-8b", 10.0, 8.5, switch_s=1.6),
            turn(7, 0, "tiny", 4.0, 3.4, switch_s=0.1),
        ],
        last_turn_id=7,
        events=[
            event(1, "info", "daemon_started", "gpupoold", "version 0.1.0"),
            event(2, "info", "model_added", "coder", "serving from /models/コーダー"),
            event(3, "warning", "overload", "coder", "3 requests were refused in a minute"),
            event(4, "error", "worker_down", "1", "ended (killed) and is restarted"),
        ],
        last_event_id=4,
        num_switches=1204,
        switched_bytes=9_700 * GIB,
    )


def picture() -> Picture:
    """After one answer."""
    return Picture(top())
