"""Bounds on prompts, checked before tokenisation and before any engine request."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

MAX_PROMPT_TOKENS = 1 << 20
"""Limit of one HTTP request: over all its prompts, times the number of answers.

A model with a longer context takes one prompt of that length.
"""

MAX_CHARS_PER_TOKEN = 8
_ALWAYS_TOKENISED_CHARS = 65_536
_MAX_WORD_CHARS = 16_384
"""Limit of all ``stop`` strings, and of all ``bad_words``, together."""

Raise = Callable[[str], Exception]


class PromptCount:
    """The prompt tokens of one HTTP request so far.

    Each of the ``num_prompts`` counts ``num_samples`` times.
    """

    def __init__(self, num_prompts: int, num_samples: int) -> None:
        self.num_prompts = num_prompts
        self._num_samples = num_samples
        self._num_tokens = 0

    def add(self, num_tokens: int, max_tokens: int) -> str:
        """Count a prompt; return why the request is refused, or ""."""
        self._num_tokens += num_tokens * self._num_samples
        if self._num_tokens <= max_tokens:
            return ""
        return (
            f"The prompts of this request have more than {max_tokens:,} tokens in all, each "
            "counted `n` times. Send fewer prompts or samples at once."
        )


_current: ContextVar[PromptCount | None] = ContextVar("prompt_count", default=None)


@contextlib.contextmanager
def counting_prompts(num_prompts: int, num_samples: int) -> Iterator[None]:
    """Count the prompts rendered in the context, and in its tasks, as those of one request."""
    token = _current.set(PromptCount(num_prompts, num_samples))
    try:
        yield
    finally:
        _current.reset(token)


def num_prompts_at_once() -> int:
    """Return the number of prompts of the present HTTP request."""
    count = _current.get()
    return 1 if count is None else count.num_prompts


def bound_renderer(renderer: Any, max_model_len: int, refused: Raise) -> None:
    """Make vLLM's renderer refuse prompts out of bounds with an error from ``refused``.

    vLLM has no bound on texts for truncation or tokenisation only, and one of up to some 100
    characters per token on others; its tokeniser would take minutes and gigabytes.
    """
    check = _length_check(max_model_len, refused)
    renderer._tokenize_prompt_async = _checked_async(
        renderer._tokenize_prompt_async, check, refused
    )
    # For pooling requests:
    renderer._tokenize_prompt = _checked(renderer._tokenize_prompt, check, refused)
    renderer.process_for_engine_async = _counted(
        renderer.process_for_engine_async, max(MAX_PROMPT_TOKENS, max_model_len), refused
    )


def why_words_are_too_long(name: str, words: Sequence[str] | None) -> str:
    """Return why these ``stop`` strings or ``bad_words`` are refused, or ""."""
    num_chars = sum(map(len, words or ()))
    if num_chars <= _MAX_WORD_CHARS:
        return ""
    return f"`{name}` has {num_chars:,} characters in all, more than {_MAX_WORD_CHARS:,}."


def max_prompt_chars(max_model_len: int) -> int:
    """Return the most characters of a text that are tokenised for a context."""
    return max(_ALWAYS_TOKENISED_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)


def _length_check(max_model_len: int, refused: Raise) -> Callable[[Any], None]:
    max_chars = max_prompt_chars(max_model_len)

    def check(prompt: Any) -> None:
        num_chars = len(prompt["prompt"])
        if num_chars > max_chars:
            raise refused(
                f"The prompt has {num_chars:,} characters, more than the {max_chars:,} that are "
                f"tokenised for a context of {max_model_len:,} tokens. "
                "Please reduce the length of the input prompt, or send it as token ids."
            )

    return check


def _checked(
    tokenize: Callable[..., Any], check: Callable[[Any], None], refused: Raise
) -> Callable[..., Any]:
    def checked(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        check(prompt)
        with _tokenising(refused):
            return tokenize(prompt, *args, **kwargs)

    return checked


def _checked_async(
    tokenize: Callable[..., Awaitable[Any]], check: Callable[[Any], None], refused: Raise
) -> Callable[..., Awaitable[Any]]:
    async def checked(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        check(prompt)
        with _tokenising(refused):
            return await tokenize(prompt, *args, **kwargs)

    return checked


@contextlib.contextmanager
def _tokenising(refused: Raise) -> Iterator[None]:
    """Refuse a text at which the tokenizer fails, as at one with too many ways to match.

    The tokenizers' library raises ``Exception`` itself, and panics that are no ``Exception``.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = str(error)[:200]
        raise refused(f"The tokenizer of this model fails at this text: {reason}") from error


def _counted(
    process: Callable[..., Awaitable[Any]], max_tokens: int, refused: Raise
) -> Callable[..., Awaitable[Any]]:
    async def counted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        count, token_ids = _current.get(), prompt.get("prompt_token_ids")
        reason = count.add(len(token_ids), max_tokens) if count and token_ids else ""
        if reason:
            raise refused(reason)
        return await process(prompt, *args, **kwargs)

    return counted
