"""First tokens behind another model's answers, under every policy that lets models take turns."""

from __future__ import annotations

import pytest

from tests.sim.box import models, request, simulate

every_policy = pytest.mark.parametrize("policy", ["gpupool", "aegaeon", "prefill-first"])


@every_policy
def test_a_prompt_does_not_wait_for_a_long_answer_on_the_only_device(policy: str) -> None:
    """A switch takes 1 s, the prompt 0.02 s; the answer before it would take 30 s."""
    requests = [request("a", output_tokens=3000), request("b", 5.0)]
    outcome = simulate(requests, models("ab"), policy)
    ttft_s = outcome.results[1].token_times_s[0] - 5.0
    assert ttft_s < 1.0 + 0.02 + 0.1


@every_policy
def test_nor_for_answers_that_find_no_room_on_the_decode_device(policy: str) -> None:
    """Four answers of 20 s each are to be decoded on a device with room for the KV of three."""
    requests = [
        request("a", request_id=f"a{number}", prompt_tokens=3000, output_tokens=2000)
        for number in range(4)
    ]
    requests.append(request("b", 8.0))
    outcome = simulate(
        requests,
        models("ab", weight_gb=5, kv_bytes_per_token=10**6),
        policy,
        num_devices=2,
        device_gb=15,
        kv_host_bytes=0,
    )
    ttft_s = outcome.results[-1].token_times_s[0] - 8.0
    assert ttft_s < 3.0
