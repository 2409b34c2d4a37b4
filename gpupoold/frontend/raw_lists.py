"""Numbers of elements in undecoded JSON."""

from __future__ import annotations

import re

import msgspec

_LIST = re.compile(rb"\s*\[")
_NUMBERS = re.compile(rb"\s*\[\s*[-0-9]")
_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def num_items(text: msgspec.Raw) -> int:
    """Return the length of a list; any other value counts as one."""
    return len(_decoder.decode(text)) if _LIST.match(memoryview(text)) else 1


def num_prompts(text: msgspec.Raw) -> int:
    """Return the number of prompts; a list of numbers is one prompt, of token ids."""
    return 1 if _NUMBERS.match(memoryview(text)) else num_items(text)
