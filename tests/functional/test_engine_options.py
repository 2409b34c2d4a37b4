"""Options of the engine: given, changed while answers run, refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import FoundInfo, ModelInfo, SetModelRequest
from gpupoold.errors import GpupoolError
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN3,
    Background,
    api_client,
    ask,
    check,
    emulated_config,
    private_daemon,
    ps,
    until,
    usage,
    weight_bytes,
)

pytestmark = pytest.mark.asyncio

PROMPT = "The daemon pauses an answer,"
LENGTH = 900


@pytest.fixture(scope="module")
def daemon(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """Two models on a device with room for one and a half."""
    device_bytes = int(1.6 * weight_bytes(tiny_models[LLAMA]))
    folder = tmp_path_factory.mktemp("options")
    with private_daemon(emulated_config(device_bytes), folder) as daemon:
        options = LOAD_OPTIONS | {"engine": {"max-num-seqs": "8", "seed": "3"}}
        daemon.add_model(LLAMA, tiny_models[LLAMA], **options)
        daemon.add_model(QWEN3, tiny_models[QWEN3], **LOAD_OPTIONS)
        yield daemon
        until(lambda: not ps(daemon).requests)
        check(daemon)


async def change(daemon: PrivateDaemon, **options: str | None) -> ModelInfo:
    """Set options of the first model, off the event loop."""
    request = SetModelRequest(engine=options)

    def call() -> ModelInfo:
        with daemon.client() as client:
            return client.set_model(LLAMA, request)

    return await asyncio.to_thread(call)


async def test_options_are_kept_by_their_names(daemon: PrivateDaemon) -> None:
    with daemon.client() as client:
        assert client.model(LLAMA).engine == {"max_num_seqs": "8", "seed": "3"}


@pytest.mark.slow
async def test_answers_go_on_in_the_new_engine(daemon: PrivateDaemon) -> None:
    """Greedy answers of the changed model and of another model, during two changes."""
    async with api_client(daemon.http_url) as api:
        expected = [await ask(api, name, PROMPT, LENGTH) for name in (LLAMA, LLAMA, QWEN3)]
        streams = [Background(api, name, PROMPT, LENGTH) for name in (LLAMA, LLAMA, QWEN3)]
        await asyncio.gather(*(stream.started() for stream in streams))
        changed = await change(daemon, max_num_seqs="4", chat_template="{{ messages }}")
        assert changed.engine["max_num_seqs"] == "4"
        assert all(stream.is_running for stream in streams[:2])
        changed = await change(daemon, max_num_seqs=None, chat_template=None)
        assert changed.engine == {"seed": "3"}
        answers = await asyncio.gather(*(stream.finished() for stream in streams))
        assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
        assert (await ask(api, LLAMA, PROMPT, LENGTH)).token_ids == expected[0].token_ids


async def test_a_word_overrides_a_found_parser(daemon: PrivateDaemon) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    request: dict[str, Any] = {
        "model": LLAMA,
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [tool],
        "max_tokens": 4,
    }
    async with api_client(daemon.http_url) as api:
        assert (await api.chat.completions.create(**request)).choices
        await change(daemon, tool_call_parser="none")
        with daemon.client() as client:
            shown = client.model(LLAMA)
        assert shown.tool_parser == FoundInfo(
            name=None, reason="set by the option tool_call_parser"
        )
        with pytest.raises(BadRequestError, match="has no tool parser"):
            await api.chat.completions.create(**request)
        await change(daemon, tool_call_parser=None, reasoning_parser="qwen3")
        answer = (await api.chat.completions.create(**request)).choices[0].message
        assert getattr(answer, "reasoning", None)  # it never ends
        with daemon.client() as client:
            shown = client.model(LLAMA)
        assert shown.tool_parser is not None
        assert shown.tool_parser.name == "hermes"
        assert shown.reasoning_parser is not None
        assert shown.reasoning_parser.name == "qwen3"
        await change(daemon, reasoning_parser=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "many"}, "max-num-seqs"),
        pytest.param({"block_size": "64"}, "block_size", marks=pytest.mark.slow),
        ({"quantization": "awq"}, "awq"),
        pytest.param(
            {"tool_call_parser": "no-such-parser"}, "no-such-parser", marks=pytest.mark.slow
        ),
        ({"tool_call_parser": "mistral"}, "could not locate the tool call token"),
    ],
)
async def test_a_wrong_option_leaves_the_model_as_before(
    daemon: PrivateDaemon, options: dict[str, Any], message: str
) -> None:
    async with api_client(daemon.http_url) as api:
        with daemon.client() as client:
            before = client.model(LLAMA).engine
        with pytest.raises(GpupoolError, match=message):
            await change(daemon, **options)
        with daemon.client() as client:
            assert client.model(LLAMA).engine == before
        assert usage(daemon, LLAMA).state == "ready"
        assert (await ask(api, LLAMA, PROMPT, 8)).finish_reason == "length"
