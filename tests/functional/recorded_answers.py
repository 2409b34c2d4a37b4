"""Answers of many families of models, in the markup that each family's template tells the model.

Each answer thinks ``THOUGHT``, if the family thinks, and calls ``get_weather`` with ``ARGUMENTS``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent.parent / "templates"
THOUGHT = "The user wants the weather."
ARGUMENTS = {"city": "Oslo", "days": 3}
_JSON = json.dumps(ARGUMENTS)
_CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
_ARGS = (
    "<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call>"
)
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_calls_section_end|>"
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_THINK = ("<think>", "</think>")
_TOOL = ("<tool_call>", "</tool_call>")
_MISTRAL = ("[TOOL_CALLS]", "[INST]", "[/INST]")
_KIMI_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A family's template, tokens and recorded answer.

    ``template`` is a file of ``TEMPLATES`` or a template's text. ``special`` tokens are left out of
    texts unless a parser wants them, ``tokens`` are not. ``text`` precedes the call. ``chat``: the
    template's arguments in the request.
    """

    model_type: str
    architecture: str = "LlamaForCausalLM"
    template: str
    answer: str
    tool: str | None
    reasoning: str | None = None
    thought: str | None = None
    text: str | None = None
    calls: bool = True
    tokens: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    chat: Mapping[str, Any] = field(default_factory=dict)


_MESSAGES = "{% for message in messages %}{{ message.role ~ ': ' ~ message.content }}{% endfor %}"
_LLAMA = (
    """{% if tools %}{{ 'Respond in the format {"name": function name, "parameters": dictionary """
    """of argument name and its value}.' ~ (tools | tojson) }}{% endif %}""" + _MESSAGES
)
_PYTHONIC = (
    "{% if tools %}{{ 'Answer [func_name1(params_name1=params_value1)]: ' ~ (tools | tojson) }}"
    "{% endif %}" + _MESSAGES
)
_LFM2 = "{% if tools %}{{ 'List of tools: ' ~ (tools | tojson) }}{% endif %}" + _MESSAGES
_OLMO3 = (
    "{% if tools %}{{ 'Call inside <function_calls></function_calls>: ' ~ (tools | tojson) }}"
    "{% endif %}" + _MESSAGES
)

RECORDED = {
    "qwen2.5": Recorded(
        model_type="qwen2",
        template="Qwen-Qwen2.5-7B-Instruct",
        tokens=_TOOL,
        answer=f"Let me look.\n<tool_call>\n{_CALL}\n</tool_call>",
        text="Let me look.",
        tool="hermes",
    ),
    "qwen3": Recorded(
        model_type="qwen3",
        template="Qwen-Qwen3-0.6B",
        tokens=(*_TOOL, *_THINK),
        answer=f"<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{_CALL}\n</tool_call>",
        thought=THOUGHT,
        tool="hermes",
        reasoning="qwen3",
    ),
    "qwen3, not thinking": Recorded(
        model_type="qwen3",
        template="Qwen-Qwen3-0.6B",
        tokens=(*_TOOL, *_THINK),
        answer=f"Let me look.\n<tool_call>\n{_CALL}\n</tool_call>",
        text="Let me look.",
        tool="hermes",
        reasoning="qwen3",
        chat={"enable_thinking": False},
    ),
    "qwen3-coder": Recorded(
        model_type="qwen3_moe",
        template="Qwen3-Coder",
        tokens=_TOOL,
        answer=f"Let me look.\n{_XML}",
        text="Let me look.",
        tool="qwen3_coder",
    ),
    "qwen3.5": Recorded(
        model_type="qwen3_5_text",
        template="Qwen3.5-4B",
        tokens=(*_TOOL, *_THINK),
        answer=f"{THOUGHT}\n</think>\n\n{_XML}",
        thought=THOUGHT,
        tool="qwen3_coder",
        reasoning="qwen3",
    ),
    "smollm3": Recorded(
        model_type="smollm3",
        template="HuggingFaceTB-SmolLM3-3B",
        tokens=_THINK,
        answer=f"<think>\n{THOUGHT}\n</think>\nIt rains.",
        thought=THOUGHT,
        text="It rains.",
        calls=False,
        tool=None,
        reasoning="qwen3",
    ),
    "phi-3.5": Recorded(
        model_type="phi3",
        template="microsoft-Phi-3.5-mini-instruct",
        answer="It rains.",
        text="It rains.",
        calls=False,
        tool=None,
    ),
    "seed-oss": Recorded(
        model_type="seed_oss",
        template="ByteDance-Seed-OSS",
        special=("<seed:bos>", "<seed:eos>"),
        tokens=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        answer=f"<seed:think>{THOUGHT}</seed:think>"
        + _XML.replace("tool_call>", "seed:tool_call>"),
        thought=THOUGHT,
        tool="seed_oss",
        reasoning="seed_oss",
    ),
    "granite-3.3": Recorded(
        model_type="granite",
        template="ibm-granite-granite-3.3-2B-Instruct",
        special=("<|tool_call|>",),
        answer=f"<|tool_call|>[{_CALL}]",
        tool="granite",
    ),
    "granite-4": Recorded(
        model_type="granitemoehybrid",
        template="ibm-granite-granite-4.0",
        tokens=_TOOL,
        answer=f"<tool_call>\n{_CALL}\n</tool_call>",
        tool="granite4",
    ),
    "apertus": Recorded(
        model_type="apertus",
        template="Apertus-8B-Instruct",
        special=("<|tools_prefix|>", "<|tools_suffix|>"),
        answer=f'<|tools_prefix|>[{{"get_weather": {_JSON}}}]<|tools_suffix|>',
        tool="apertus",
    ),
    "mistral-nemo": Recorded(
        model_type="mistral",
        template="mistralai-Mistral-Nemo-Instruct-2407",
        special=_MISTRAL,
        answer=f"[TOOL_CALLS][{_CALL}]",
        tool="mistral",
    ),
    "mistral-small-3.2": Recorded(
        model_type="mistral",
        template="Mistral-Small-3.2-24B-Instruct-2506",
        special=(*_MISTRAL, "[ARGS]"),
        answer=f"[TOOL_CALLS]get_weather[ARGS]{_JSON}",
        tool="mistral",
    ),
    "ministral-3": Recorded(
        model_type="mistral",
        template="mistralai-Ministral-3-14B-Reasoning-2512",
        special=(*_MISTRAL, "[ARGS]", "[THINK]", "[/THINK]"),
        answer=f"[THINK]{THOUGHT}[/THINK][TOOL_CALLS]get_weather[ARGS]{_JSON}",
        thought=THOUGHT,
        tool="mistral",
        reasoning="mistral",
    ),
    "step-3.5": Recorded(
        model_type="step3p5",
        template="StepFun3.5-Flash",
        tokens=(*_TOOL, *_THINK),
        answer=f"{THOUGHT}\n</think>\n{_XML}",
        thought=THOUGHT,
        tool="step3p5",
        reasoning="step3p5",
    ),
    "gemma-4": Recorded(
        model_type="gemma4_text",
        template="google-gemma-4-31B-it",
        special=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        answer=f'<|channel>thought\n{THOUGHT}<channel|><|tool_call>call:get_weather{{city:<|"|>Oslo'
        '<|"|>,days:3}<tool_call|>',
        thought=THOUGHT,
        tool="gemma4",
        reasoning="gemma4",
        chat={"enable_thinking": True},
    ),
    "minicpm5": Recorded(
        model_type="llama",
        template="openbmb-MiniCPM5-1B",
        tokens=(*_THINK, "<function", "</function>", "<param", "</param>"),
        answer=f"<think>\n{THOUGHT}\n</think>\n\n"
        '<function name="get_weather"><param name="city">Oslo</param><param name="days">3</param>'
        "</function>",
        thought=THOUGHT,
        tool="minicpm5",
        reasoning="qwen3",
    ),
    "bielik": Recorded(
        model_type="llama",
        template="Bielik-11B-v3.0-Instruct",
        tokens=(*_TOOL, *_THINK),
        answer=f"{THOUGHT}\n</think>\n<tool_call>\n{_CALL}\n</tool_call>",
        thought=THOUGHT,
        tool="hermes",
        reasoning="deepseek_v3",
        chat={"enable_thinking": True},
    ),
    "bielik, not thinking": Recorded(
        model_type="llama",
        template="Bielik-11B-v3.0-Instruct",
        tokens=(*_TOOL, *_THINK),
        answer=f"<tool_call>\n{_CALL}\n</tool_call>",
        tool="hermes",
        reasoning="deepseek_v3",
    ),
    "deepseek-r1": Recorded(
        model_type="deepseek_v3",
        template="deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        tokens=(*_DEEPSEEK, *_THINK),
        answer=f"{THOUGHT}\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        f"<｜tool▁sep｜>get_weather\n```json\n{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought=THOUGHT,
        tool="deepseek_v3",
        reasoning="deepseek_r1",
    ),
    "deepseek-v3.1": Recorded(
        model_type="deepseek_v3",
        template="deepseek-ai-DeepSeek-V3.1",
        tokens=(*_DEEPSEEK, *_THINK),
        answer="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
        f"<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        tool="deepseek_v31",
        reasoning="deepseek_v3",
    ),
    "deepseek-v3.2": Recorded(
        model_type="deepseek_v3",
        template="deepseek-ai-DeepSeek-V3.2",
        tokens=("｜DSML｜", *_THINK),
        answer=f"{THOUGHT}</think>\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        thought=THOUGHT,
        tool="deepseek_v32",
        reasoning="deepseek_v3",
        chat={"thinking": True},
    ),
    "glm-4.6": Recorded(
        model_type="glm4_moe",
        template="GLM-4.6",
        tokens=(*_TOOL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        answer=f"\n<think>{THOUGHT}</think>\n<tool_call>get_weather\n{_ARGS}",
        thought=THOUGHT,
        tool="glm45",
        reasoning="glm45",
    ),
    "glm-4.7": Recorded(
        model_type="glm4_moe_lite",
        template="GLM-4.7-Flash",
        tokens=(*_TOOL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        answer=f"{THOUGHT}</think><tool_call>get_weather{_ARGS}",
        thought=THOUGHT,
        tool="glm47",
        reasoning="glm47",
    ),
    "ling-3": Recorded(
        model_type="llama",
        template="inclusionai-ling-3.0-flash",
        tokens=(*_TOOL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        answer=f"{THOUGHT}</think>\n<tool_call>get_weather{_ARGS}",
        thought=THOUGHT,
        tool="ling3",
        reasoning="ling3",
    ),
    "kimi-k2": Recorded(
        model_type="deepseek_v3",
        template="Kimi-K2-Instruct",
        special=_KIMI_TOKENS,
        answer=f"Let me look.{_KIMI}",
        text="Let me look.",
        tool="kimi_k2",
    ),
    "kimi-k2-thinking": Recorded(
        model_type="deepseek_v3",
        template="Kimi-K2-Thinking",
        special=_KIMI_TOKENS,
        tokens=_THINK,
        answer=f"<think>{THOUGHT}</think>{_KIMI}",
        thought=THOUGHT,
        tool="kimi_k2",
        reasoning="kimi_k2",
    ),
    "mimo-vl": Recorded(
        model_type="qwen2",
        template="MiMo-VL",
        tokens=_TOOL,
        answer=f"<tool_call>\n{_CALL}\n</tool_call>",
        tool="hermes",
    ),
    "minimax-m2": Recorded(
        model_type="minimax_m2",
        template="MiniMax-M2",
        tokens=("<minimax:tool_call>", "</minimax:tool_call>", *_THINK),
        answer=f'{THOUGHT}\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        thought=THOUGHT,
        tool="minimax_m2",
        reasoning="minimax_m2",
    ),
    "gigachat-3": Recorded(
        model_type="deepseek_v3",
        template="GigaChat3.1-10B-A1.8B",
        special=("<|role_sep|>", "<|message_sep|>", "<|function_call|>"),
        answer=f"<|function_call|>{_CALL}",
        tool="gigachat3",
    ),
    "gpt-oss": Recorded(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        template="openai-gpt-oss-120b",
        answer=f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>"
        f"commentary to=functions.get_weather <|constrain|>json<|message|>{_JSON}<|call|>",
        thought=THOUGHT,
        tool="openai",
        reasoning="openai_gptoss",
    ),
    "llama-3.1": Recorded(
        model_type="llama",
        template=_LLAMA,
        special=("<|python_tag|>", "<|eot_id|>"),
        answer=json.dumps({"name": "get_weather", "parameters": ARGUMENTS}),
        tool="llama3_json",
    ),
    "llama-4": Recorded(
        model_type="llama",
        template=_PYTHONIC,
        answer='[get_weather(city="Oslo", days=3)]',
        tool="pythonic",
    ),
    "lfm2": Recorded(
        model_type="lfm2",
        template=_LFM2,
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
        answer='<|tool_call_start|>[get_weather(city="Oslo", days=3)]<|tool_call_end|>',
        tool="lfm2",
    ),
    "olmo-3": Recorded(
        model_type="olmo3",
        template=_OLMO3,
        answer='<function_calls>get_weather(city="Oslo", days=3)</function_calls>',
        tool="olmo3",
    ),
}
