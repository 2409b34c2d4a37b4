"""``run``: ask a model something and watch the answer come."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import typer

from gpupool_cli import output
from gpupool_cli.chat import (
    DEFAULT_SILENCE_S,
    KEY_VARIABLE,
    ChatPiece,
    ChatRequest,
    ChatServer,
    ChatWait,
    stream_chat,
)
from gpupool_cli.diagnostics import say
from gpupool_cli.options import NameArgument, duration_s
from gpupool_cli.progress import WaitView
from gpupool_cli.session import open_client
from gpupoold.errors import UsageError
from gpupoold.units import format_duration, without_controls

_T = TypeVar("_T")


class AnswerTiming:
    """Times of an answer's pieces by this process's clock."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._num_pieces = 0
        self._num_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens by the server's count, without it the pieces."""
        return self._num_pieces if self._num_tokens is None else self._num_tokens

    @property
    def ttft_s(self) -> float | None:
        """The time to the first token; None if none has arrived."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the tokens after the first; None if there are none."""
        elapsed_s = 0.0 if self._first_s is None else self._last_s - self._first_s
        return (self.num_tokens - 1) / elapsed_s if elapsed_s > 0 else None

    def note(self, piece: ChatPiece, now_s: float) -> None:
        """Add a piece that arrived at ``now_s``."""
        if piece.num_tokens is not None:
            self._num_tokens = piece.num_tokens
        if piece.text or piece.reasoning:
            self._num_pieces += 1
            self._last_s = now_s
            if self._first_s is None:
                self._first_s = now_s

    def summary(self) -> str:
        """Time to first token, tokens and tokens per second after the first."""
        if self.ttft_s is None:
            return "no tokens"
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        return f"ttft {format_duration(self.ttft_s)}, {self.num_tokens} tokens{rate}"


def run(
    ctx: typer.Context,
    name: NameArgument,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads the prompt from stdin.")],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message.")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Also print, to stderr, the model's reasoning, the time to first token"
            " and tokens per second.",
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            parser=duration_s,
            help="Longest time without data from the server; default: 10m.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as one JSON document.")
    ] = False,
) -> None:
    """Stream one chat completion to stdout.

    An API key, if needed, is taken from $GPUPOOL_API_KEY.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty", "give the prompt as PROMPT, or on stdin with -")
    request = ChatRequest(name, text, system, max_tokens, timeout or DEFAULT_SILENCE_S)
    with open_client(ctx) as client:
        status = client.status()
    server = ChatServer(status.http_url, _key(), status.tls_cert)
    timing = AnswerTiming(time.monotonic())
    pieces: list[ChatPiece] = []
    last = ""
    with WaitView() as view:
        for piece in stream_chat(server, request):
            if piece.wait is not None:
                view.show(wait_text(piece.wait))
                continue
            view.end()
            timing.note(piece, time.monotonic())
            if as_json:
                pieces.append(piece)
                continue
            output.print_piece(piece.text)
            last = piece.text or last
            if verbose and piece.reasoning:
                print(without_controls(piece.reasoning), end="", file=sys.stderr, flush=True)
    if as_json:
        output.print_json(_answer(name, pieces, timing))
    elif not last.endswith("\n"):
        output.print_line("")
    if verbose:
        say(timing.summary())


def _answer(model: str, pieces: Sequence[ChatPiece], timing: AnswerTiming) -> dict[str, object]:
    return {
        "model": model,
        "id": _last(piece.request_id for piece in pieces),
        "text": "".join(piece.text for piece in pieces),
        "reasoning": "".join(piece.reasoning for piece in pieces),
        "finish_reason": _last(piece.finish_reason for piece in pieces),
        "num_prompt_tokens": _last(piece.num_prompt_tokens for piece in pieces),
        "num_tokens": timing.num_tokens,
        "ttft_s": timing.ttft_s,
        "tokens_per_s": timing.tokens_per_s,
    }


def _last(values: Iterable[_T | None]) -> _T | None:
    """Return the last value that a piece had; None without any."""
    known = [value for value in values if value is not None]
    return known[-1] if known else None


def wait_text(wait: ChatWait) -> str:
    """Return the line that is shown while the answer has not begun."""
    parts = [] if wait.place is None else [f"place {wait.place}"]
    if wait.estimate_s is not None:
        parts.append(f"about {format_duration(wait.estimate_s)}")
    return ", ".join(["waiting", *parts])


def _key() -> str | None:
    """The API key; from the environment, not an option: everyone can see a command's options."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"what is in ${KEY_VARIABLE} is no API key")
    return key or None
