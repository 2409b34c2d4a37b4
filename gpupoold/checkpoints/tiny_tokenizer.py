"""The tokenizer of the tiny checkpoints: byte-level BPE, trained on the standard library's text."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

VOCAB_SIZE = 2048
MAX_POSITION_EMBEDDINGS = 4096
PAD_ID, EOS_ID = 0, 2

_END_OF_TEXT, _IM_START, _IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_NUM_TRAINING_FILES = 80

# Requires Jinja's ``trim_blocks``, which Transformers sets for chat templates.
_CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}
{%- if tools %}
{{ '\n' if system }}Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>. There are:
{%- for tool in tools %}
{{ '\n' ~ (tool | tojson) }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' ~ ((call.function or call) | tojson) ~ '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def write_tokenizer(folder: Path) -> list[int]:
    """Train and write the tokenizer; return the ids of all tokens except printable ASCII."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_TOOL_TAGS),
        special_tokens=[_END_OF_TEXT, _IM_START, _IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_NUM_TRAINING_FILES]
    tokenizer.train(list(map(str, files)), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TOOL_TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE.strip())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _IM_END,
        "pad_token": _END_OF_TEXT,
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return [i for i in range(VOCAB_SIZE) if not _is_plain(tokenizer.decode([i]))]


def _is_plain(text: str) -> bool:
    if not text or text in _TOOL_TAGS:
        return False
    return text.isascii() and text.replace("\n", "").isprintable()
