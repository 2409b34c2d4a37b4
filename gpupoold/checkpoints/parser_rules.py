"""Table of the markup of tool calls and reasoning, with vLLM's parser for each.

The first rule that fits decides, so that rules for few models precede rules for many.
"""

from __future__ import annotations

from typing import NamedTuple


class ParserRule(NamedTuple):
    """A rule: a template with this markup is read by this parser of vLLM.

    A rule fits if the template has all ``markers`` and none of ``without``, and one of ``kinds`` is
    an architecture of the model or begins its model type; no kinds: all models. ``markup`` is the
    markup in the words of the reason. The parser needs the ``tokens`` in the vocabulary, and the
    Python package ``module``. With ``parser`` None vLLM has no parser, see ``remark``.
    """

    parser: str | None
    markup: str = ""
    markers: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    module: str = ""
    remark: str = ""


_V4 = ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")
_INKLING = ("InklingForCausalLM", "InklingForConditionalGeneration")
_HUNYUAN = ("hunyuan", "HunYuanMoEV1ForCausalLM", "HunYuanDenseV1ForCausalLM")
_THINK = ("<think>", "</think>")
_V3_CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
_ARG_KEY = ("<tool_call>", "<arg_key>", "<arg_value>")
_XML = ("<tool_call>", "<function=", "<parameter=")
_META_JSON = ("dictionary of argument name and its value",)

TOOL_RULES = (
    # vLLM renders the prompts of these architectures itself.
    ParserRule("openai", kinds=("gpt_oss", "GptOssForCausalLM")),
    ParserRule("deepseek_v32", kinds=("DeepseekV32ForCausalLM",)),
    ParserRule("deepseek_v4", kinds=_V4),
    ParserRule("deepseek_v41", kinds=("DeepseekV41ForCausalLM",)),
    ParserRule("kimi_k3", kinds=("KimiK3ForConditionalGeneration",)),
    ParserRule("inkling", kinds=_INKLING),
    # Markup of one family.
    ParserRule("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    ParserRule("deepseek_v32", "DSML function_calls", ("｜DSML｜", "function_calls>")),
    ParserRule("deepseek_v4", "DSML tool_calls", ("｜DSML｜", "tool_calls>")),
    ParserRule(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜> with fenced JSON",
        ("<｜tool▁calls▁begin｜>", "```json"),
        tokens=_V3_CALLS,
    ),
    ParserRule(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜> with JSON",
        ("<｜tool▁calls▁begin｜>",),
        tokens=_V3_CALLS,
    ),
    ParserRule("kimi_k2", "<|tool_calls_section_begin|>", ("<|tool_calls_section_begin|>",)),
    ParserRule("minimax_m2", "<minimax:tool_call>", ("<minimax:tool_call>",)),
    ParserRule("minimax_m3", "]<]minimax[>[<tool_call>", ("]<]minimax[>[", "<tool_call>")),
    ParserRule("longcat", "<longcat_tool_call>", ("<longcat_tool_call>",)),
    ParserRule("dots", "<dots_function_call>", ("<dots_function_call>",)),
    ParserRule("seed_oss", "<seed:tool_call>", ("<seed:tool_call>",)),
    ParserRule("gemma4", "<|tool_call>", ("<|tool_call>", "<tool_call|>")),
    ParserRule("functiongemma", "<start_function_call>", ("<start_function_call>",)),
    ParserRule("apertus", "<|tools_prefix|>", ("<|tools_prefix|>",)),
    ParserRule("k2_horizon", "<ifm|tool_call>", ("<ifm|tool_call",)),
    ParserRule("muse_glimmer", "<atem:function_calls>", ("<atem:function_calls>",)),
    ParserRule("plamo3", "<|plamo:begin_tool_request:plamo|>", ("<|plamo:begin_tool_request",)),
    ParserRule(
        "step3", "<｜tool_calls_begin｜> with steptml", ("<｜tool_calls_begin｜>", "steptml")
    ),
    ParserRule("internlm", "<|action_start|>", ("<|action_start|>", "<|plugin|>")),
    ParserRule(
        "cohere_command4",
        "<|START_ACTION|> and <|START_TEXT|>",
        ("<|START_ACTION|>", "<|START_TEXT|>"),
        module="cohere_melody",
    ),
    ParserRule(
        "cohere_command3", "<|START_ACTION|>", ("<|START_ACTION|>",), module="cohere_melody"
    ),
    ParserRule("gigachat3", "<|function_call|>", ("<|function_call|>", "<|message_sep|>")),
    ParserRule("gigachat3", "the role 'function call'", ("'function call'", "<|role_sep|>")),
    ParserRule("minicpm5", '<function name="', ('<function name="', '<param name="')),
    ParserRule(
        "lfm2",
        "<|tool_call_start|>",
        ("<|tool_call_start|>",),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ParserRule(
        "lfm2",
        "a list of tools for <|tool_call_start|>",
        ("List of tools: ",),
        kinds=("lfm2",),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ParserRule("olmo3", "<function_calls>", ("<function_calls>",), kinds=("olmo",)),
    ParserRule("hy_v4", "<tool_calls>", ("tool_call",), kinds=("hy_v4",)),
    ParserRule("hy_v3", "<tool_calls>", ("tool_call",), kinds=("hy_v3",)),
    ParserRule("hunyuan_a13b", "<tool_calls>", ("<tool_calls>",), kinds=_HUNYUAN),
    ParserRule(
        "jamba",
        "<tool_calls>",
        ("<tool_calls>",),
        kinds=("jamba",),
        tokens=("<tool_calls>", "</tool_calls>"),
    ),
    # <tool_call> of many families: with <arg_key>, with <function=, or with JSON.
    ParserRule("ling3", "<arg_key> after <role>", (*_ARG_KEY, "<role>")),
    ParserRule("poolside_v1", "<tool_call> with <arg_key>", _ARG_KEY, kinds=("laguna",)),
    ParserRule("glm45", "<arg_key> on its own line", (*_ARG_KEY, "\n<arg_key>")),
    ParserRule("glm47", "<tool_call> with <arg_key>", _ARG_KEY),
    ParserRule("step3p5", "<tool_call> with <function=", _XML, kinds=("step3p",)),
    ParserRule("mimo", "<tool_call> with <function=", _XML, kinds=("mimo", "MiMo")),
    ParserRule("qwen3_coder", "<tool_call> with <function=", _XML),
    ParserRule("granite", "<|tool_call|>", ("<|tool_call|>",), kinds=("granite",)),
    ParserRule("granite4", "<tool_call> with JSON", ("</tool_call>",), kinds=("granite",)),
    ParserRule("granite", "<tool_call> without an end", ("<tool_call>",), kinds=("granite",)),
    ParserRule("granite-20b-fc", "<function_call>", ("<function_call>",), kinds=("gpt_bigcode",)),
    ParserRule("ernie45", "<tool_call> with JSON", ("<tool_call>",), kinds=("ernie4_5",)),
    ParserRule(
        "hermes", "<tool_call> with JSON", ("<tool_call>", "</tool_call>"), ("<tool_calls>",)
    ),
    # Calls without own markup, told to the model in words.
    ParserRule("phi4_mini_json", "functools[", ("functools[",)),
    ParserRule("llama4_pythonic", "[func_name1(", ("[func_name1(",), kinds=("llama4",)),
    ParserRule("pythonic", "[func_name1(", ("[func_name1(",)),
    ParserRule(
        "llama4_json",
        '{"name": ..., "parameters": ...}',
        _META_JSON,
        kinds=("llama4",),
        tokens=("<|python_tag|>",),
    ),
    ParserRule(
        "llama3_json",
        '{"name": ..., "parameters": ...}',
        _META_JSON,
        without=("<function=",),
        tokens=("<|python_tag|>",),
    ),
)
"""Rules for tool calls; the first that fits decides."""

REASONING_RULES = (
    ParserRule("openai_gptoss", kinds=("gpt_oss", "GptOssForCausalLM")),
    ParserRule("deepseek_v3", kinds=("DeepseekV32ForCausalLM",), tokens=_THINK),
    ParserRule("deepseek_v4", kinds=_V4),
    ParserRule("deepseek_v41", kinds=("DeepseekV41ForCausalLM",)),
    ParserRule("kimi_k3", kinds=("KimiK3ForConditionalGeneration",)),
    ParserRule("inkling", kinds=_INKLING),
    ParserRule("mistral", "[THINK]", ("[THINK]",), tokens=("[THINK]", "[/THINK]", "[TOOL_CALLS]")),
    ParserRule(
        "deepseek_v4", "DSML tool_calls and <think>", ("｜DSML｜", "tool_calls>", "<think>")
    ),
    ParserRule("seed_oss", "<seed:think>", ("<seed:think>",)),
    ParserRule("minimax_m3", "<mm:think>", ("<mm:think>",), tokens=("<mm:think>", "</mm:think>")),
    ParserRule("minimax_m2", "<think> of MiniMax M2", ("<minimax:tool_call>", "<think>")),
    ParserRule("gemma4", "<|channel>", ("<|channel>", "<channel|>")),
    ParserRule("muse_glimmer", "<atem:function_calls>", ("<atem:function_calls>",)),
    ParserRule("plamo3", "<|plamo:begin_think:plamo|>", ("<|plamo:begin_think",)),
    ParserRule(
        "k2_horizon", "<ifm|think>", ("<ifm|think",), tokens=("<ifm|think>", "</ifm|think>")
    ),
    ParserRule(
        "cohere_command4",
        "<|START_THINKING|> and <|START_TEXT|>",
        ("<|START_THINKING|>", "<|START_TEXT|>"),
        module="cohere_melody",
    ),
    ParserRule(
        "cohere_command3", "<|START_THINKING|>", ("<|START_THINKING|>",), module="cohere_melody"
    ),
    ParserRule(
        "granite",
        "'Here is my thought process'",
        ("Here is my thought process",),
        kinds=("granite",),
    ),
    ParserRule(
        None,
        "<think> and <response>",
        ("<think>", "<response>"),
        without=_XML,
        kinds=("granite",),
        remark="vLLM has no parser for reasoning with <response>",
    ),
    ParserRule(
        "granite_thinking_parser", "<think> with <function=", ("<think>", *_XML), kinds=("granite",)
    ),
    # <think> of many families.
    ParserRule("kimi_k2", "<think> of Kimi K2", ("<think>", "<|tool_calls_section_begin|>")),
    ParserRule("ling3", "<think> after <role>", ("<think>", "<role>", "<arg_key>")),
    ParserRule("glm45", "<think>", ("<think>", *_ARG_KEY, "\n<arg_key>"), kinds=("glm",)),
    ParserRule("glm47", "<think>", ("<think>", *_ARG_KEY), kinds=("glm",)),
    ParserRule(
        "poolside_v1",
        "<think>",
        ("<think>", "enable_thinking | default(false)"),
        kinds=("laguna",),
        tokens=(*_THINK, "<assistant>"),
    ),
    ParserRule("nemotron_v3", "<think> with <function=", ("<think>", *_XML), kinds=("nemotron",)),
    ParserRule("step3p5", "<think>", ("<think>",), kinds=("step3p",)),
    ParserRule("step3", "<think>", ("<think>",), kinds=("step3",), tokens=("</think>",)),
    ParserRule("mimo", "<think> with <function=", ("<think>", *_XML), kinds=("mimo", "MiMo")),
    ParserRule("minicpmv", "<think>", ("<think>",), kinds=("minicpmv", "MiniCPMV")),
    ParserRule("hy_v4", "<think>", ("think",), kinds=("hy_v4",)),
    ParserRule("hy_v3", "<think>", ("think",), kinds=("hy_v3",)),
    ParserRule("hunyuan_a13b", "<think> and <answer>", ("<think>", "<answer>"), kinds=_HUNYUAN),
    ParserRule("ernie45", "<think>", ("<think>",), kinds=("ernie4_5",), tokens=_THINK),
    # The parser looks for the pieces of </think>, which is no token.
    ParserRule("olmo3", "<think>", ("<think>",), kinds=("olmo",), tokens=("Ġ</",)),
    ParserRule("deepseek_r1", "<think>", ("<think>", "</think>"), kinds=("lfm2",), tokens=_THINK),
    ParserRule(
        "deepseek_r1",
        "</think> of DeepSeek R1",
        ("<｜Assistant｜>", "</think>"),
        without=("<think>",),
        tokens=_THINK,
    ),
)
"""Rules for reasoning; ``rules.find_reasoning_parser`` knows more about <think>."""
