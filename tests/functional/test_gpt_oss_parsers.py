"""A recorded answer of gpt-oss, in the tokens of OpenAI's vocabulary, which vLLM's parser reads."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.functional.family_checkpoints import write_checkpoint
from tests.functional.recorded_answers import ARGUMENTS, THOUGHT, Recorded
from tests.functional.scripted_peer import ScriptedPeer
from tests.functional.test_parsers import (
    CALL,
    QUESTION,
    SCHEMA,
    TOOL,
    Heard,
    heard_of_message,
    streamed_chat,
    whole_chat,
)

NAME = "gpt-oss"
GPT_OSS = Recorded(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    template="openai-gpt-oss-120b",
    answer=f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>",
    tool="openai",
    reasoning="openai_gptoss",
)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedPeer]:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    path = write_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "checkpoint", GPT_OSS)
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    with ScriptedPeer({NAME: path}) as running:
        running.script[NAME] = encoding.encode(GPT_OSS.answer, allowed_special="all")
        yield running


def test_chat_completions(peer: ScriptedPeer) -> None:
    request = {"model": NAME, "messages": QUESTION, "tools": [TOOL]}
    with OpenAI(base_url=f"{peer.url}/v1", api_key="none", max_retries=0) as client:
        for hear in (whole_chat, streamed_chat):
            assert hear(client, request) == Heard(THOUGHT, "", [CALL], "tool_calls")


def test_anthropic_messages(peer: ScriptedPeer) -> None:
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
    with Anthropic(base_url=peer.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(  # type: ignore[call-overload]
            model=NAME, messages=QUESTION, tools=[tool], max_tokens=200
        )
    assert heard_of_message(message) == Heard(THOUGHT, "", [CALL], "tool_use")
