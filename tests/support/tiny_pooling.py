"""Tiny random checkpoints of models that embed, rank or classify, made offline.

The folders have the layout of sentence-transformers where real checkpoints have one. Equal
arguments give equal bytes.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder
from gpupoold.checkpoints.tiny_tokenizer import (
    EOS_ID,
    MAX_POSITION_EMBEDDINGS,
    PAD_ID,
    VOCAB_SIZE,
    write_tokenizer,
)
from gpupoold.errors import UsageError

_RECIPE_FILE = "gpupool_tiny_pooling.json"
_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING_MODES = ("cls_token", "mean_tokens", "lasttoken")
# Larger than the usual 0.02, so that different texts have clearly different embeddings.
_WEIGHT_STD = 0.15
_CLS, _SEP = "<|endoftext|>", "<|im_end|>"


@dataclass(frozen=True, slots=True)
class PoolingKind:
    """A kind of model; ``pooling_mode`` is empty without a sentence-transformers layout.

    ``labels`` name the classes. ``is_encoder``: the tokenizer marks the begin and the end of texts.
    """

    key: str
    hf_class: str
    config_class: str
    pooling_mode: str = ""
    labels: tuple[str, ...] = ()
    is_encoder: bool = True


KINDS = {
    kind.key: kind
    for kind in (
        PoolingKind("bert-embed", "BertModel", "BertConfig", "mean_tokens"),
        PoolingKind("modernbert-embed", "ModernBertModel", "ModernBertConfig", "cls_token"),
        PoolingKind(
            "qwen3-embed", "Qwen3ForCausalLM", "Qwen3Config", "lasttoken", is_encoder=False
        ),
        PoolingKind(
            "bert-rerank", "BertForSequenceClassification", "BertConfig", labels=("relevance",)
        ),
        PoolingKind(
            "qwen3-rerank",
            "Qwen3ForSequenceClassification",
            "Qwen3Config",
            labels=("relevance",),
            is_encoder=False,
        ),
        PoolingKind(
            "bert-classify",
            "BertForSequenceClassification",
            "BertConfig",
            labels=("negative", "neutral", "positive"),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    """The inputs that determine a checkpoint's bytes, except the standard library's text."""

    kind: str
    hidden_size: int = 128
    num_layers: int = 2
    seed: int = 0
    version: int = 1


def make_pooling_checkpoint(parent: Path, recipe: PoolingRecipe) -> Path:
    """Make (or keep, if present) one checkpoint below ``parent``, in float32.

    Raises:
        UsageError: the kind is unknown, the width is no multiple of 64, or the folder cannot be
            created.
    """
    kind = KINDS.get(recipe.kind)
    if kind is None:
        raise UsageError(f"unknown kind {recipe.kind!r}", f"use {', '.join(KINDS)} or all")
    if recipe.hidden_size < 1 or recipe.hidden_size % 64:
        raise UsageError(f"a width of {recipe.hidden_size} is no multiple of 64")
    target = parent / f"tiny-{kind.key}"
    recipe_file = target / _RECIPE_FILE
    if recipe_file.exists() and json.loads(recipe_file.read_text()) == asdict(recipe):
        return target
    with whole_folder(target) as folder:
        write_tokenizer(folder)
        (folder / "chat_template.jinja").unlink()
        if kind.is_encoder:
            _mark_ends(folder)
        _write_model(folder, kind, recipe)
        if kind.pooling_mode:
            _write_modules(folder, kind.pooling_mode)
        _write_json(folder / _RECIPE_FILE, asdict(recipe))
    return target


def _write_model(folder: Path, kind: PoolingKind, recipe: PoolingRecipe) -> None:
    import torch
    import transformers

    config = getattr(transformers, kind.config_class)(**_sizes(kind, recipe))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed + zlib.crc32(kind.key.encode()))
        model = getattr(transformers, kind.hf_class)(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.normal_(std=_WEIGHT_STD)
    model.eval().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def _sizes(kind: PoolingKind, recipe: PoolingRecipe) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 2 * recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.hidden_size // 64,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS if not kind.is_encoder else 512,
        "initializer_range": _WEIGHT_STD,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "architectures": [kind.hf_class],
    }
    if kind.config_class == "Qwen3Config":
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": 64}
    if kind.config_class == "ModernBertConfig":
        sizes |= {"cls_token_id": PAD_ID, "sep_token_id": EOS_ID}
    if kind.labels:
        names = dict(enumerate(kind.labels))
        sizes |= {"id2label": names, "label2id": {name: at for at, name in names.items()}}
    return sizes


def _mark_ends(folder: Path) -> None:
    """Make the tokenizer write ``[CLS] A [SEP]`` and ``[CLS] A [SEP] B [SEP]``, as BERT's."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{_CLS} $A {_SEP}",
        pair=f"{_CLS} $A {_SEP} $B:1 {_SEP}:1",
        special_tokens=[(_CLS, PAD_ID), (_SEP, EOS_ID)],
    )
    tokenizer.save(str(file))
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings |= {"cls_token": _CLS, "sep_token": _SEP, "model_max_length": 512}
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    _write_json(settings_file, settings)


def _write_modules(folder: Path, pooling_mode: str) -> None:
    """Write the files of sentence-transformers, whose pooling has a folder of its own."""
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{name}" if at else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(_MODULES)
    ]
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256})
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    modes = {f"pooling_mode_{one}": one == pooling_mode for one in _POOLING_MODES}
    _write_json(pooling / "config.json", modes)


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: print one line per checkpoint, errors to stderr; return the exit
    code.
    """
    parser = maker_parser(
        "tests.support.tiny_pooling", "Make tiny random pooling checkpoints, offline."
    )
    parser.add_argument("--kind", default="all", help=f"{', '.join(KINDS)} or all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args(argv)
    names = list(KINDS) if args.kind == "all" else [args.kind]
    made: Iterator[Path] = (
        make_pooling_checkpoint(args.dir, PoolingRecipe(name, seed=args.seed)) for name in names
    )
    return print_made(made, lambda file: file.st_size, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
