"""Folders with the small files of a family of models: configuration, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, write_tokenizer
from tests.functional.recorded_answers import TEMPLATES, Recorded
from tests.functional.scripted_peer import MAX_MODEL_LEN


def write_checkpoint(path: Path, recorded: Recorded) -> Path:
    """Write a checkpoint without weights into the new folder ``path``."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoConfig

    path.mkdir()
    for file in _plain_tokenizer(path.parent).iterdir():
        shutil.copy(file, path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for texts, is_special in ((recorded.special, True), (recorded.tokens, False)):
        tokenizer.add_tokens([AddedToken(t, special=is_special, normalized=False) for t in texts])
    tokenizer.save(str(path / "tokenizer.json"))
    is_file = "{" not in recorded.template
    text = (TEMPLATES / f"{recorded.template}.jinja").read_text() if is_file else recorded.template
    (path / "chat_template.jinja").write_text(text)
    config: dict[str, Any] = AutoConfig.for_model(recorded.model_type).to_dict()
    # vLLM inspects each architecture in a process of its own, which takes seconds.
    config["architectures"] = [recorded.architecture]
    config["max_position_embeddings"] = config["max_seq_len"] = MAX_MODEL_LEN
    (path / "config.json").write_text(json.dumps(config))
    return path


def encode(path: Path, recorded: Recorded) -> list[int]:
    """Return the tokens of an answer with the token that ends an answer."""
    if recorded.model_type == "gpt_oss":  # vLLM's parser reads tokens of OpenAI's vocabulary
        from openai_harmony import (  # type: ignore[import-untyped]
            HarmonyEncodingName,
            load_harmony_encoding,
        )

        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        ids: list[int] = encoding.encode(recorded.answer, allowed_special="all")
        return ids
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [*tokenizer.encode(recorded.answer).ids, EOS_ID]


@cache
def _plain_tokenizer(folder: Path) -> Path:
    path = folder / "plain-tokenizer"
    path.mkdir()
    write_tokenizer(path)
    return path
