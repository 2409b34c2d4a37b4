"""vLLM's reasons for not loading a model, in words that fit what the user can do here."""

from __future__ import annotations

import re

from gpupoold.errors import Refused

_MAX_CHARACTERS = 600
_MAX_LINES = 4
_WANTED_LENGTH = re.compile(r"max seq len \((\d+)\)")
_POSSIBLE_LENGTH = re.compile(r"estimated maximum model length is (\d+)")


def refusal(model: str, error: BaseException) -> Refused:
    """The error to show for a model whose engine could not be built."""
    text = str(error)
    if wanted := _WANTED_LENGTH.search(text):
        return _too_long(model, int(wanted[1]), _POSSIBLE_LENGTH.search(text))
    if "No available memory for the cache blocks" in text:
        return Refused(
            f"{model}: its weights leave no room for KV on the device",
            "use a smaller dtype or a larger device",
        )
    hint = "see `gpupool logs` for the engine's full message"
    if "architectures" in text or "not supported" in text:
        hint = "see vLLM's list of supported models"
    return Refused(f"{model}: {_useful(text) or type(error).__name__}", hint)


def _too_long(model: str, wanted: int, possible: re.Match[str] | None) -> Refused:
    message = f"{model}: the KV of one request of {wanted} tokens does not fit beside the weights"
    if possible is None:
        return Refused(message, "use a smaller dtype or a larger device")
    return Refused(
        f"{message}; up to {possible[1]} tokens would",
        f"add it with --max-len {possible[1]} or less, or use a larger device",
    )


def _useful(text: str) -> str:
    """The beginning of a message without the pointers that pydantic adds."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith("For further information")]
    return " ".join(useful[:_MAX_LINES])[:_MAX_CHARACTERS]
