"""Tiny random vision checkpoints, made offline by transformers' own classes.

``python -m tests.support.tiny_vision DIR`` writes a Qwen2.5-VL, a Qwen3-VL, a Gemma 3 and
a Gemma 4, each with its processor's files. Weights are float32 and scaled so that greedy text
depends on the image as well as on the text. Equal arguments on the same machine give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder
from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, PAD_ID, write_tokenizer
from gpupoold.errors import UsageError
from tests.support.tiny_vision_configs import (
    GEMMA4_TOKENS,
    GEMMA_TOKENS,
    HIDDEN_SIZE,
    QWEN_TOKENS,
    VOCAB_SIZE,
    gemma4_config,
    gemma_config,
    qwen2_5_config,
    qwen3_config,
)
from tests.support.tiny_vision_processors import (
    write_gemma4_processor,
    write_gemma_processor,
    write_qwen2_5_processor,
    write_qwen3_processor,
)

if TYPE_CHECKING:
    import torch

RECIPE_FILE = "gpupool_tiny_vision.json"
_RECIPE = {"version": 1, "dtype": "float32"}

# vLLM joins newlines around an image to one of these tokens.
_GEMMA_NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")

_GEMMA_NAMES = (
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)

# The content of a message is text, or a list of text and images.
_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- part.text if part.type == 'text' else 'IMAGE' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Standard deviations in units of 1/sqrt(fan_in); as in ``tiny.py``, except for images: features of
# two images of the same size must differ as much as two texts do.
_QUERY_KEY_GAIN = 2.0
_OUTPUT_GAIN = 2.0
_LOGIT_STD = 3.0
_IMAGE_GAIN = 4.0


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family's checkpoint folder, tokens and makers of configuration and processor.

    ``tokens`` are by their names in the tokenizer's configuration. ``published`` has prefixes of
    names of tensors, and the ones of published checkpoints. ``one_plus`` norms of the text model
    multiply by one more than their weights. ``embedding_std`` is of embeddings of text,
    ``query_key_mean`` of the weights of norms of queries and keys.
    """

    checkpoint_name: str
    image_text: str
    tokens: Mapping[str, str]
    hf_class: str
    config: Callable[[Callable[[str], int]], Any]
    write_processor: Callable[[Path], None]
    published: tuple[tuple[str, str], ...] = ()
    newlines: tuple[str, ...] = ()
    one_plus: bool = False
    query_key_mean: float = _QUERY_KEY_GAIN
    embedding_std: float = 1.0


def make_vision_checkpoint(parent: Path, family: VisionFamily) -> Path:
    """Make (or keep, if present) one checkpoint below ``parent``.

    Raises:
        UsageError: the folder cannot be created.
    """
    target = parent / family.checkpoint_name
    try:
        if json.loads((target / RECIPE_FILE).read_text()) == _RECIPE:
            return target
    except (OSError, ValueError):
        pass
    with whole_folder(target) as folder:
        silent = write_tokenizer(folder)
        token_id = _add_tokens(folder, family)
        silent += range(token_id(next(iter(family.tokens.values()))), VOCAB_SIZE)
        _write_model(folder, family, token_id, silent)
        family.write_processor(folder)
        ends = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
        for name, content in (("generation_config.json", ends), (RECIPE_FILE, _RECIPE)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return target


def _add_tokens(folder: Path, family: VisionFamily) -> Callable[[str], int]:
    """Add the family's tokens and chat template; return the map from tokens to ids."""
    from tokenizers import AddedToken, Tokenizer

    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in family.tokens.values()]
    )
    tokenizer.add_tokens(list(family.newlines))
    tokenizer.save(str(file))
    template = _TEMPLATE.strip().replace("IMAGE", family.image_text)
    (folder / "chat_template.jinja").write_text(template)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | family.tokens
    config_file.write_text(json.dumps(config, indent=2) + "\n")

    def token_id(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None
        return found

    return token_id


def _write_model(
    folder: Path, family: VisionFamily, token_id: Callable[[str], int], silent_ids: Sequence[int]
) -> None:
    """Draw the weights; the output rows of ``silent_ids`` are 0, so greedy text avoids the ids."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = family.config(token_id)
    config.dtype = torch.float32
    model_class = getattr(transformers, family.hf_class)
    model = model_class(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(family.checkpoint_name.encode()))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            _draw(name, tensor, generator, family)
        model.lm_head.weight[list(silent_ids)] = 0
    config.architectures = [family.hf_class]
    config.save_pretrained(folder)
    tensors = {_hub_name(name, family): tensor for name, tensor in model.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files readable only by the owner


def _hub_name(name: str, family: VisionFamily) -> str:
    """Return a tensor's name in published checkpoints, which engines expect."""
    for prefix, published in family.published:
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    return name


def _draw(
    name: str, tensor: torch.Tensor, generator: torch.Generator, family: VisionFamily
) -> None:
    """Fill a parameter."""
    import torch

    noise = torch.randn(tensor.shape, generator=generator)
    if name.endswith("bias"):
        tensor.copy_(noise * 0.1)
    elif tensor.dim() == 1:  # a norm
        is_query_key = "q_norm" in name or "k_norm" in name
        mean = family.query_key_mean if is_query_key else 1.0
        tensor.copy_(noise * 0.1 + mean - float(family.one_plus and "vision" not in name))
    elif "embed_tokens.weight" in name:
        tensor.copy_(noise * family.embedding_std)
    elif "embed_tokens" in name or "pos" in name:
        tensor.copy_(noise)
    else:
        # All weights are (out, in, ...) but Gemma's projection of images, a plain (in, out).
        is_in_first = "mm_input_projection" in name
        fan_in = tensor.shape[0] if is_in_first else tensor[0].numel()
        tensor.copy_(noise * _gain(name) / math.sqrt(fan_in))


def _gain(name: str) -> float:
    if "lm_head" in name:
        return _LOGIT_STD
    if any(part in name for part in ("patch_embed", "merger", "projector", "embed_vision")):
        return _IMAGE_GAIN
    if any(part in name for part in ("q_proj", "k_proj")):
        return _QUERY_KEY_GAIN
    if any(part in name for part in ("o_proj", "down_proj", "fc2", "out_proj")):
        return _OUTPUT_GAIN
    return 1.0


_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

VISION_FAMILIES = {
    "qwen2_5_vl": VisionFamily(
        "tiny-qwen2.5-vl",
        _QWEN_IMAGE,
        QWEN_TOKENS,
        "Qwen2_5_VLForConditionalGeneration",
        qwen2_5_config,
        write_qwen2_5_processor,
    ),
    "qwen3_vl": VisionFamily(
        "tiny-qwen3-vl",
        _QWEN_IMAGE,
        QWEN_TOKENS,
        "Qwen3VLForConditionalGeneration",
        qwen3_config,
        write_qwen3_processor,
    ),
    "gemma3": VisionFamily(
        "tiny-gemma3-vision",
        "<start_of_image>",
        GEMMA_TOKENS,
        "Gemma3ForConditionalGeneration",
        gemma_config,
        write_gemma_processor,
        published=_GEMMA_NAMES,
        newlines=_GEMMA_NEWLINES,
        one_plus=True,
    ),
    # Its text model multiplies embeddings by the square root of the width; its attention does not
    # divide by the square root of the size of a head.
    "gemma4": VisionFamily(
        "tiny-gemma4-vision",
        "<|image|>",
        GEMMA4_TOKENS,
        "Gemma4ForConditionalGeneration",
        gemma4_config,
        write_gemma4_processor,
        query_key_mean=0.7,
        embedding_std=1 / math.sqrt(HIDDEN_SIZE),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: print one line per checkpoint, errors to stderr; return the exit
    code.
    """
    parser = maker_parser(
        "tests.support.tiny_vision", "Make tiny random vision checkpoints, offline."
    )
    parser.add_argument("--arch", default="all", help=f"{', '.join(VISION_FAMILIES)} or all")
    args = parser.parse_args(argv)
    made = (make_vision_checkpoint(args.dir, family) for family in _families(args))
    return print_made(made, lambda file: file.st_size, as_json=args.json)


def _families(args: argparse.Namespace) -> Iterator[VisionFamily]:
    if args.arch == "all":
        yield from VISION_FAMILIES.values()
    elif args.arch in VISION_FAMILIES:
        yield VISION_FAMILIES[args.arch]
    else:
        known = ", ".join(VISION_FAMILIES)
        raise UsageError(f"unknown architecture {args.arch!r}", f"use {known} or all")


if __name__ == "__main__":
    sys.exit(main())
