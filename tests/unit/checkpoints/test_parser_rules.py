"""The parsers found by the markup of real templates, and of short ones with a family's markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from gpupoold.checkpoints.parser_rules import REASONING_RULES, TOOL_RULES
from gpupoold.checkpoints.parsers import (
    ChatFormat,
    Finding,
    find_reasoning_parser,
    find_tool_parser,
)

TEMPLATES = Path(__file__).parents[2] / "templates"

# Parsers of ``rules``, which are not in the table.
BY_RULES = {"hf", "qwen3", "holo2", "deepseek_v3", "deepseek_r1"}
NOT_CHOSEN = {
    "qwen3_json": "another name of hermes",
    "qwen3_xml": "another name of qwen3_coder",
    "xlam": "reads several kinds of markup, which others read too",
    "minimax_m2_append_think": "leaves the reasoning in the text; minimax_m2 separates it",
}

# Template, model type, tool parser, reasoning parser.
REAL = [
    ("Apertus-8B-Instruct", "apertus", "apertus", None),
    ("Bielik-11B-v3.0-Instruct", "llama", "hermes", "deepseek_v3"),
    ("ByteDance-Seed-OSS", "seed_oss", "seed_oss", "seed_oss"),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "llama", "deepseek_v3", "deepseek_r1"),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek_v3", "deepseek_v31", "deepseek_v3"),
    ("deepseek-ai-DeepSeek-V3.2", "deepseek_v3", "deepseek_v32", "deepseek_v3"),
    ("deepseek-ai-DeepSeek-V4", "deepseek_v3", "deepseek_v4", "deepseek_v4"),
    ("GigaChat3.1-10B-A1.8B", "deepseek_v3", "gigachat3", None),
    ("GLM-4.6", "glm4_moe", "glm45", "glm45"),
    ("GLM-4.7-Flash", "glm4_moe_lite", "glm47", "glm47"),
    ("google-gemma-4-31B-it", "gemma4", "gemma4", "gemma4"),
    ("HuggingFaceTB-SmolLM3-3B", "smollm3", None, "qwen3"),
    ("ibm-granite-granite-3.3-2B-Instruct", "granite", "granite", None),
    ("ibm-granite-granite-4.0", "granitemoehybrid", "granite4", None),
    ("inclusionai-ling-3.0-flash", "bailing_hybrid", "ling3", "ling3"),
    ("Kimi-K2-Instruct", "kimi_k2", "kimi_k2", None),
    ("Kimi-K2-Thinking", "kimi_k2", "kimi_k2", "kimi_k2"),
    ("microsoft-Phi-3.5-mini-instruct", "phi3", None, None),
    ("MiMo-VL", "qwen2_5_vl", "hermes", None),
    ("MiniMax-M2", "minimax_m2", "minimax_m2", "minimax_m2"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral3", "mistral", "mistral"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "mistral", None),
    ("Mistral-Small-3.2-24B-Instruct-2506", "mistral3", "mistral", None),
    ("openai-gpt-oss-120b", "gpt_oss", "openai", "openai_gptoss"),
    ("openbmb-MiniCPM5-1B", "llama", "minicpm5", "qwen3"),
    ("Qwen-Qwen2.5-7B-Instruct", "qwen2", "hermes", None),
    ("Qwen-Qwen3-0.6B", "qwen3", "hermes", "qwen3"),
    ("Qwen3-Coder", "qwen3_moe", "qwen3_coder", None),
    ("Qwen3.5-4B", "qwen3_5", "qwen3_coder", "qwen3"),
    ("StepFun3.5-Flash", "step3p5", "step3p5", "step3p5"),
]
_META = 'tools: {"name": function name, "parameters": dictionary of argument name and its value}'
_XML = "tools <tool_call><function=a><parameter=b></tool_call>"
_PROMPT = "{% if add_generation_prompt %}"
MADE = [
    (_META, "llama", "llama3_json", None),
    (_META, "llama4", "llama4_json", None),
    (_META + "<function=", "llama", None, None),
    ("tools: [func_name1(a=1)]", "llama", "pythonic", None),
    ("tools: [func_name1(a=1)]", "llama4", "llama4_pythonic", None),
    ("List of tools: ", "lfm2_moe", "lfm2", None),
    ("List of tools: <think></think>", "lfm2_moe", "lfm2", "deepseek_r1"),
    ("List of tools: split('</think>')", "lfm2", "lfm2", None),
    ("<function_calls>", "olmo3", "olmo3", None),
    ("<|START_ACTION|><|START_THINKING|>", "cohere2", "cohere_command3", "cohere_command3"),
    ("<|START_ACTION|><|START_TEXT|>", "cohere2_moe", "cohere_command4", None),
    ("<tool_calls>", "hunyuan_v1_moe", "hunyuan_a13b", None),
    ("<tool_calls>", "jamba", "jamba", None),
    ("tools <tool_calls>", "minimax", None, None),
    ("tools <tool_call></tool_call> <tool_calls>", "mistral", None, None),
    ("<tool_call>", "granite", "granite", None),
    ("Here is my thought process", "granite", None, "granite"),
    (_XML + "<think>", "granite", "qwen3_coder", "granite_thinking_parser"),
    (_XML + "<think>", "nemotron_h", "qwen3_coder", "nemotron_v3"),
    (_XML + "<think>", "mimo_v2_flash", "mimo", "mimo"),
    ("<function_call>", "gpt_bigcode", "granite-20b-fc", None),
    ("<tool_call><think>", "ernie4_5_moe", "ernie45", "ernie45"),
    ("functools[", "phi3", "phi4_mini_json", None),
    ("<start_function_call>", "gemma3_text", "functiongemma", None),
    ("<longcat_tool_call>", "longcat_flash", "longcat", None),
    ("<|action_start|><|plugin|>", "internlm2", "internlm", None),
    # Reasoning that a request may turn on or off, or that each answer begins with.
    ("{% if enable_thinking is false %}<think>", "llama", None, "qwen3"),
    ("{% set enable_thinking = enable_thinking | default(true) %}<think>", "llama", None, "qwen3"),
    ("{% if thinking is defined and not thinking %}<think>", "llama", None, "holo2"),
    ("{% if enable_thinking is not false %}<think>", "llama", None, "qwen3"),
    ("{% if thinking is not defined or thinking %}<think>", "llama", None, "holo2"),
    ("{% if enable_thinking %}<think>", "llama", None, "deepseek_v3"),
    ("{% if thinking is defined and thinking %}<think>", "llama", None, "deepseek_v3"),
    (_PROMPT + "<think>", "llama", None, "deepseek_r1"),
    (_PROMPT + "<think>", "qwen3", None, "qwen3"),
    # Reasoning is only removed from earlier answers.
    ("{{ content.split('<think>') }}" + _PROMPT, "llama", None, None),
    ("{{ content.split('</think>') }}" + _PROMPT, "qwen3", None, None),
]


def chat(template: str | None, model_type: str, **changes: object) -> ChatFormat:
    """A checkpoint whose tokenizer has every token."""
    values = {
        "architectures": ("LlamaForCausalLM",),
        "model_types": (model_type,),
        "template": template,
        "has_token": lambda token: True,
        "has_module": lambda name: True,
    }
    return ChatFormat(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("template", "model_type", "tool", "reasoning"), REAL)
def test_real_templates(
    template: str, model_type: str, tool: str | None, reasoning: str | None
) -> None:
    text = (TEMPLATES / f"{template}.jinja").read_text()
    assert find_tool_parser(chat(text, model_type)).name == tool
    assert find_reasoning_parser(chat(text, model_type)).name == reasoning


def test_every_real_template_is_in_the_list() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {row[0] for row in REAL}


@pytest.mark.parametrize(("template", "model_type", "tool", "reasoning"), MADE)
def test_markup_and_kind(
    template: str, model_type: str, tool: str | None, reasoning: str | None
) -> None:
    assert find_tool_parser(chat(template, model_type)).name == tool
    assert find_reasoning_parser(chat(template, model_type)).name == reasoning


def test_the_reason_names_the_markup_and_the_kind() -> None:
    found = find_tool_parser(chat("<tool_call></tool_call>", "granite"))
    assert found.reason == "the template writes <tool_call> with JSON; model type granite"
    gpt_oss = chat(None, "gpt_oss")
    assert find_tool_parser(gpt_oss) == Finding("openai", "model type gpt_oss")
    v32 = chat(None, "deepseek_v32", architectures=("DeepseekV32ForCausalLM",))
    assert find_tool_parser(v32).reason == "architecture DeepseekV32ForCausalLM"


def test_a_parser_is_not_chosen_without_its_tokens_and_packages() -> None:
    without = chat("[TOOL_CALLS]", "mistral", has_token=lambda token: False)
    assert find_tool_parser(without) == Finding(
        None, "the template writes [TOOL_CALLS], but the tokenizer has no token [TOOL_CALLS]"
    )
    thinking = chat(_PROMPT + "<think>", "llama", has_token=lambda token: False)
    assert find_reasoning_parser(thinking).name is None
    cohere = chat("<|START_ACTION|>", "cohere2", has_module=lambda name: False)
    assert "needs the Python package cohere_melody" in find_tool_parser(cohere).reason


def test_the_reasons_for_no_parser() -> None:
    assert find_tool_parser(chat(None, "llama")).reason == "there is no chat template"
    assert find_reasoning_parser(chat(None, "llama")).reason == "there is no chat template"
    assert find_tool_parser(chat("{{ tools }}", "llama")).reason.startswith("vLLM has no parser")
    assert find_tool_parser(chat("", "llama")).reason == "the template has no tools"


def test_the_tokenizers_response_template_is_the_last_resort() -> None:
    fields = frozenset(("tool_calls", "thinking", "content"))
    assert find_tool_parser(chat("", "llama", response_fields=fields)).name == "hf"
    assert find_reasoning_parser(chat("", "llama", response_fields=fields)).name == "hf"
    # vLLM does not combine hf with another parser.
    hermes = chat("<tool_call></tool_call>", "llama", response_fields=fields)
    assert find_tool_parser(hermes).name == "hermes"
    assert find_reasoning_parser(hermes).name is None


@pytest.mark.parametrize(
    ("rules", "manager"),
    [(TOOL_RULES, ToolParserManager), (REASONING_RULES, ReasoningParserManager)],
)
def test_the_table_covers_the_parsers_of_the_installed_vllm(rules, manager) -> None:  # type: ignore[no-untyped-def]
    registered = set(manager.list_registered())
    chosen = {rule.parser for rule in rules if rule.parser is not None}
    assert chosen <= registered
    assert registered - chosen - BY_RULES <= NOT_CHOSEN.keys()


def test_the_parsers_of_the_rules_are_registered() -> None:
    reasoning = set(ReasoningParserManager.list_registered())
    assert reasoning >= BY_RULES
    known = reasoning | set(ToolParserManager.list_registered())
    assert known >= NOT_CHOSEN.keys()
