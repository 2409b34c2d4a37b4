"""Many streams over four models on a device for one and a half: every token as when alone."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.domain import Switch
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    MODELS,
    QWEN2,
    QWEN3,
    Answer,
    Background,
    Traces,
    ask,
    check,
    cli,
    device,
    eventually,
    open_stream,
    ps,
    usage,
)

NUM_STREAMS = 16
PROMPTS = ("Once upon a time", "def main():\n    return", "1, 2, 3, 4,", "hello " * 60)


async def run_cli(pool: PrivateDaemon, *arguments: str) -> tuple[int, str]:
    """``gpupool`` beside the event loop: exit status and what it told."""
    done = await asyncio.to_thread(cli, pool, *arguments)
    return done.returncode, done.stderr


async def add(pool: PrivateDaemon, name: str, path: Path) -> None:
    await asyncio.to_thread(pool.add_model, name, path, **LOAD_OPTIONS)


def num_bytes(switch: Switch) -> int:
    return switch.weight_bytes + switch.kv_in_bytes + switch.kv_out_bytes


class TestTogether:
    async def test_concurrent_answers_equal_those_alone(
        self, pool: PrivateDaemon, api: AsyncOpenAI
    ) -> None:
        jobs = [
            (MODELS[index % len(MODELS)], f"{index} {PROMPTS[index // len(MODELS) % len(PROMPTS)]}")
            for index in range(NUM_STREAMS)
        ]
        alone = [await ask(api, *job, 24) for job in jobs]
        before = ps(pool)
        together = await asyncio.gather(*(ask(api, *job, 24) for job in jobs))
        assert together == alone
        assert all(len(answer.token_ids) == 24 for answer in together)
        after = ps(pool)
        assert after.num_switches - before.num_switches >= len(MODELS)
        assert after.switched_bytes > before.switched_bytes
        check(pool)

    async def test_switch_records_add_up(self, pool: PrivateDaemon, api: AsyncOpenAI) -> None:
        before = ps(pool)
        await asyncio.gather(*(ask(api, name, "add up", 16) for name in MODELS * 2))
        after = ps(pool)
        num_new = after.num_switches - before.num_switches
        with pool.client() as client:
            switches = client.switches(num_new)
        assert len(switches) == num_new
        for switch in switches:
            stages_s = (switch.evict_s, switch.map_s, switch.weights_s, switch.kv_s)
            assert all(seconds >= 0 for seconds in stages_s)
            assert sum(stages_s) <= switch.total_s * 1.01 + 1e-6
        for later, earlier in itertools.pairwise(switches):
            assert later.at >= earlier.at
            # Its own KV may have left for a model that then was not switched to.
            assert later.model != later.previous or num_bytes(later)
        assert sum(map(num_bytes, switches)) == after.switched_bytes - before.switched_bytes
        for stage in ("total", "evict", "map", "weights", "kv"):
            recorded_s = sum(getattr(switch, f"{stage}_s") for switch in switches)
            counted_s = after.switch_seconds[stage] - before.switch_seconds[stage]
            assert recorded_s == pytest.approx(counted_s, rel=1e-6, abs=1e-9)

    async def test_counts_of_ps(self, pool: PrivateDaemon, api: AsyncOpenAI) -> None:
        before = usage(pool, QWEN2)
        await asyncio.gather(*(ask(api, QWEN2, f"count {i}", 20) for i in range(5)))
        after = usage(pool, QWEN2)
        assert after.requests - before.requests == 5
        assert after.completed - before.completed == 5
        assert after.tokens - before.tokens == 100


class TestLeaving:
    async def test_a_client_that_leaves_ends_its_request(
        self, pool: PrivateDaemon, api: AsyncOpenAI
    ) -> None:
        stream = await open_stream(api, QWEN3, "nobody waits for this", LONG)
        await anext(aiter(stream))
        assert [request.model for request in ps(pool).requests] == [QWEN3]
        await eventually(lambda: usage(pool, QWEN3).kv_resident_bytes > 0, 2)
        await stream.close()
        await eventually(lambda: not ps(pool).requests, 5)
        await eventually(lambda: usage(pool, QWEN3).num_live == 0, 5)
        # What is left of its KV is nobody's: making room for others saves none of it.
        await ask(api, LLAMA, "take the room", 4)
        with pool.client() as client:
            assert client.switches(1)[0].kv_out_bytes == 0
        assert usage(pool, QWEN3).kv_host_bytes == 0
        assert device(pool).kv_host_bytes == 0

    async def test_clients_that_leave_do_not_disturb_others(
        self, pool: PrivateDaemon, api: AsyncOpenAI
    ) -> None:
        expected = await ask(api, QWEN3, "stay", 100)
        staying = Background(api, QWEN3, "stay", 100)
        leaving = [await open_stream(api, model, "leave", LONG) for model in MODELS * 2]
        for stream in leaving:
            await anext(aiter(stream))
            await stream.close()
        assert await staying.finished() == expected

    async def test_a_client_that_leaves_before_the_first_token(
        self, pool: PrivateDaemon, api: AsyncOpenAI
    ) -> None:
        tasks = [asyncio.create_task(ask(api, model, "never mind", LONG)) for model in MODELS * 3]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: not ps(pool).requests, 5)


async def ask_until_refused(api: AsyncOpenAI, model: str) -> None:
    """Frontends hear a moment later that a model drains."""
    for _ in range(50):
        await ask(api, model, "too late", 1)


class TestModelsComeAndGo:
    async def test_while_others_stream(
        self, pool: PrivateDaemon, api: AsyncOpenAI, tiny_models: dict[str, Path]
    ) -> None:
        before = Traces.of(pool)
        jobs = [(model, "keep going") for model in (LLAMA, QWEN3)]
        alone = [await ask(api, *job, 280) for job in jobs]
        streams = [Background(api, *job, 280) for job in jobs]
        for stream in streams:
            await stream.started()
        assert any(stream.is_running for stream in streams)
        try:
            await add(pool, "guest", tiny_models[QWEN3])
            guest = await ask(api, "guest", "keep going")
        finally:  # other tests share the daemon
            assert await run_cli(pool, "rm", "guest") == (0, "guest: removed\n")
        with pytest.raises(openai.NotFoundError):
            await ask(api, "guest", "keep going")
        assert [await stream.finished() for stream in streams] == alone
        assert guest.token_ids == alone[1].token_ids[: len(guest.token_ids)]
        check(pool)
        assert Traces.of(pool) == before

    @pytest.mark.slow
    async def test_a_busy_model_is_not_removed(self, pool: PrivateDaemon, api: AsyncOpenAI) -> None:
        expected = await ask(api, LLAMA, "busy", LONG)
        stream = Background(api, LLAMA, "busy", LONG)
        await stream.started()
        status, told = await run_cli(pool, "rm", LLAMA)
        assert stream.is_running
        assert status == 5
        assert "1 live requests" in told
        assert "--drain" in told
        assert await stream.finished() == expected

    @pytest.mark.slow
    async def test_draining_lets_requests_end(
        self, pool: PrivateDaemon, api: AsyncOpenAI, tiny_models: dict[str, Path]
    ) -> None:
        before = Traces.of(pool)
        await add(pool, "guest", tiny_models[QWEN2])
        expected = await ask(api, "guest", "drain", LONG)
        stream = Background(api, "guest", "drain", LONG)
        await stream.started()
        removal = asyncio.create_task(run_cli(pool, "rm", "--drain", "guest"))
        await eventually(lambda: usage(pool, "guest").state == "draining")
        assert stream.is_running
        with pytest.raises(openai.InternalServerError, match="draining") as caught:
            await ask_until_refused(api, "guest")
        assert caught.value.response.headers["retry-after"]
        # Other models can be changed while this one drains.
        assert (await run_cli(pool, "set", LLAMA, "--ttft", "10s"))[0] == 0
        assert await stream.finished() == expected
        assert (await removal)[0] == 0
        assert Traces.of(pool) == before

    @pytest.mark.slow
    async def test_force_ends_requests_and_spares_others(
        self, pool: PrivateDaemon, api: AsyncOpenAI, tiny_models: dict[str, Path]
    ) -> None:
        before = Traces.of(pool)
        await add(pool, "guest", tiny_models[QWEN2])
        expected = await ask(api, QWEN3, "spared", LONG)
        spared = Background(api, QWEN3, "spared", LONG)
        doomed = [Background(api, "guest", f"doomed {i}", LONG) for i in range(3)]
        for stream in (spared, *doomed):
            await stream.started()
        assert (await run_cli(pool, "rm", "--force", "guest"))[0] == 0
        for stream in doomed:
            with pytest.raises(openai.APIError, match="guest was removed"):
                await stream.finished()
        assert await spared.finished() == expected
        await eventually(lambda: not ps(pool).requests, 5)
        assert Traces.of(pool) == before

    @pytest.mark.slow
    async def test_force_overtakes_a_drain(
        self, pool: PrivateDaemon, api: AsyncOpenAI, tiny_models: dict[str, Path]
    ) -> None:
        await add(pool, "guest", tiny_models[QWEN2])
        streams = [Background(api, "guest", f"doomed {i}", LONG) for i in range(12)]
        for stream in streams:
            await stream.started()
        draining = asyncio.create_task(run_cli(pool, "rm", "--drain", "guest"))
        await eventually(lambda: usage(pool, "guest").state == "draining")
        assert (await run_cli(pool, "rm", "--force", "guest"))[0] == 0
        assert (await draining)[0] == 0
        outcomes = await asyncio.gather(*(s.finished() for s in streams), return_exceptions=True)
        assert any(isinstance(outcome, openai.APIError) for outcome in outcomes)
        assert all(isinstance(outcome, openai.APIError | Answer) for outcome in outcomes)
