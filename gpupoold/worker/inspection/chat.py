"""Trials of a chat template and a tokenizer, in forked children that may die.

A template is a program of the checkpoint's author. It runs in the frontends, for every model, so a
template that does not end on ordinary conversations is refused before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import string
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.config import ModelConfig
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.hf import resolve_chat_template, safe_apply_chat_template

from gpupoold.engine_options.parsing import parse_options
from gpupoold.errors import Refused
from gpupoold.system.process import die_with_parent, limit_use
from gpupoold.wire.messages import ModelToLoad

MAX_RENDER_S = 1
"""Limit of CPU time for all conversations together, in seconds."""
_MAX_TOKENISE_S = 10
_MAX_MEMORY_BYTES = 1 << 30
_WAIT_S = 60.0
"""Limit by the clock, for a child that waits for a core."""
_MAX_REASON_BYTES = 500
_NUM_REPEATED = 1000
_CHARACTERS = (*string.printable, "é", "ж", "字", "\u0301", "\U0001f600", "\u200b")

_QUESTION = {"role": "user", "content": "How is the weather in Paris?"}
_ANSWER = {"role": "assistant", "content": "It rains."}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Paris"}},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"rain": 1}'}
_IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_SYSTEM = {"role": "system", "content": "Be brief."}
_CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_QUESTION], None),
    ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION], None),
    ([_QUESTION], [_TOOL]),
    ([_SYSTEM, _QUESTION, _CALL, _RESULT, _ANSWER, _QUESTION], [_TOOL]),
    ([_IMAGE], None),
    ([{"role": "user", "content": "word " * 20_000}], None),
    ([_SYSTEM, *[_QUESTION, _ANSWER] * 50, _QUESTION], [_TOOL] * 5),
)


def check_chat(model: ModelToLoad, config: ModelConfig, tokenizer: Any) -> None:
    """Render conversations by the model's template, and tokenise texts.

    A template may refuse a conversation, such as one with images.

    Raises:
        Refused: the template or the tokenizer exceeds a limit, or ends its process.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return  # Mistral's renders by itself
    given = load_chat_template(parse_options(model.engine).get("chat_template"))
    # Here, and not in the child: reading the files of a processor may take long.
    resolve_chat_template(tokenizer, given, None, model_config=config)
    if problem := _problem(lambda: _render(config, tokenizer, given), MAX_RENDER_S):
        raise Refused(
            f"{model.name}: the chat template {problem} for ordinary conversations",
            "use the original model's template: put it into the folder, or name its file by "
            "the option chat_template",
        )
    if problem := _problem(lambda: _tokenise(tokenizer), _MAX_TOKENISE_S):
        raise Refused(
            f"{model.name}: the tokenizer {problem} for texts of {_NUM_REPEATED:,} characters",
            "use the original model's tokenizer files",
        )


def _render(config: ModelConfig, tokenizer: Any, given: str | None) -> None:
    for conversation, tools in _CONVERSATIONS:
        try:
            safe_apply_chat_template(
                config,
                tokenizer,
                conversation,  # type: ignore[arg-type]
                tools=tools,
                chat_template=given,
                tokenize=False,
                add_generation_prompt=True,
            )
        except MemoryError:
            raise
        except Exception as error:
            if _is_memory_error(error):
                raise MemoryError from error


def _is_memory_error(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _tokenise(tokenizer: Any) -> None:
    for character in _CHARACTERS:
        text = character * _NUM_REPEATED
        try:
            tokenizer.encode(text)
        except BaseException as error:  # a panic of the tokenizers' library is no Exception
            reason = f"fails at the repeated {character!r}: {error}"
            raise _Failure(reason) from error


class _Failure(Exception):
    """A reason for a refusal, found in the child."""


def _problem(work: Callable[[], None], cpu_s: int) -> str:
    """Return what is wrong with ``work``, done in a child with limits; empty if nothing is."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _try(work, cpu_s, write_fd, parent_pid)
    os.close(write_fd)
    ended_fd = os.pidfd_open(pid)
    try:
        is_late = not select.select([ended_fd], [], [], _WAIT_S)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(ended_fd)
    with os.fdopen(read_fd, "rb") as result:
        reason = result.read(_MAX_REASON_BYTES).decode(errors="replace")
    if is_late:
        return f"takes more than {_WAIT_S:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"takes more than {cpu_s} s of CPU time"
    return reason or ("" if code == 0 else f"ends its process (status {code})")


def _try(work: Callable[[], None], cpu_s: int, result_fd: int, parent_pid: int) -> None:
    """Be the child; does not return."""
    reason = ""
    try:
        die_with_parent(parent_pid)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        limit_use(cpu_s, _MAX_MEMORY_BYTES)
        try:
            work()
        except MemoryError:
            reason = f"takes more than {_MAX_MEMORY_BYTES >> 30} GiB of memory"
        except _Failure as failure:
            reason = str(failure)
        with contextlib.suppress(OSError):
            os.write(result_fd, reason.encode(errors="replace")[:_MAX_REASON_BYTES])
    finally:
        os._exit(0)
