"""The prompts of the checks, with images for vision models."""

from __future__ import annotations

import base64
import functools
import random
from typing import Any, NamedTuple

from gpupoold.checkpoints.tiny_tokenizer import VOCAB_SIZE

# Lengths of prompts and answers in tokens. The last prompt is longer than every window, and its
# answer long enough to be interrupted.
SIZES = ((20, 48), (80, 48), (150, 256))
LONG = len(SIZES) - 1
WITH_IMAGE = (0, LONG)
"""The prompts of a vision model that have an image; different images."""


class Prompt(NamedTuple):
    """Token ids, and vLLM's encoded features of the images between them, in base64."""

    token_ids: list[int]
    features: tuple[str, ...] = ()

    def followed_by(self, token_ids: list[int]) -> Prompt:
        """Return the prompt with more tokens at the end."""
        return self._replace(token_ids=self.token_ids + token_ids)


def prompt_of(index: int) -> Prompt:
    """Return a prompt of text."""
    rng = random.Random(index)
    return Prompt([rng.randrange(300, VOCAB_SIZE - 148) for _ in range(SIZES[index][0])])


def encoded_features(features: Any) -> tuple[str, ...]:
    """Return a request's features as text."""
    from vllm.v1.serial_utils import MsgpackEncoder

    frames: Any = MsgpackEncoder().encode(features)
    return tuple(base64.b64encode(frame).decode() for frame in frames)


@functools.cache
def decoded_features(features: tuple[str, ...]) -> Any:
    """Return the features of ``encoded_features``; None of a prompt without images."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.serial_utils import MsgpackDecoder

    if not features:
        return None
    # Writable, as torch.frombuffer warns of tensors over other buffers.
    frames = [bytearray(base64.b64decode(text)) for text in features]
    return MsgpackDecoder(list[MultiModalFeatureSpec]).decode(frames)
