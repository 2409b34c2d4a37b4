"""A real engine is timed when it is loaded, beside another that is answering."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.latency.models import Profile
from tests.functional.daemon_tools import weight_bytes
from tests.functional.worker_peer import WorkerPeer

pytestmark = pytest.mark.slow

BUDGET_S = 6.0
PROMPT = list(range(5, 95))
NUM_TOKENS = 300


def test_profiling_leaves_no_trace(tiny_models: dict[str, Path]) -> None:
    """On a device that holds one and a half models, so the one that answers is evicted."""
    sizes = [weight_bytes(path) for path in tiny_models.values()]
    peer = WorkerPeer(int(1.5 * max(sizes)), quota_max_s=0.05)
    try:
        peer.load("busy", tiny_models["tiny-llama"])
        peer.ask("busy", "alone", PROMPT, max_tokens=NUM_TOKENS)
        peer.run_until_ended("alone")

        peer.ask("busy", "beside", PROMPT, max_tokens=NUM_TOKENS)
        while len(peer.tokens["beside"]) < 20:
            peer.pump(1.0)
        num_before = len(peer.tokens["beside"])
        measured = load_and_profile(peer, "new", tiny_models["tiny-qwen3"])
        assert len(peer.tokens["beside"]) > num_before, "it waited for the whole load"
        peer.run_until_ended("beside")
        assert peer.tokens["beside"] == peer.tokens["alone"]
        assert set(peer.tokens) == {"alone", "beside"}, "synthetic requests must not be heard of"

        # Steps that are too long for the stream are left out.
        assert measured.problem == "" or "beside running streams" in measured.problem
        assert measured.duration_s < 3 * BUDGET_S
        peer.status = None
        while peer.status is None:
            peer.pump(1.0)
        [memory] = [row for row in peer.status.models if row.model == "new"]
        assert (memory.kv_resident_bytes, memory.kv_host_bytes, memory.num_live) == (0, 0, 0)
        peer.call("check_integrity")

        measured = load_and_profile(peer, "later", tiny_models["tiny-qwen3"])
        assert measured.problem == ""
        assert measured.prefill is not None
        assert measured.decode is not None
        assert measured.prefill.prefill_law().predict_s([500]) > 0
        peer.call("check_integrity")

        peer.ask("new", "first", PROMPT, max_tokens=20)
        peer.run_until_ended("first")
        assert len(peer.tokens["first"]) == 20
    finally:
        peer.close()


def load_and_profile(peer: WorkerPeer, name: str, path: Path) -> Profile:
    profile = peer.load(name, path, profiling_budget_s=BUDGET_S).profile
    assert isinstance(profile, Profile)
    return profile
