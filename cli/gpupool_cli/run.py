"""``run``: ask a model something and watch the answer come."""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import httpx
import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import NameArgument, duration_s, open_client
from gpupool_cli.progress import WaitView
from gpupoold.api.client import split_lines
from gpupoold.errors import (
    Failed,
    GpupoolError,
    NoSuchModel,
    Refused,
    TimedOut,
    Unavailable,
    UsageError,
)
from gpupoold.units import format_duration, without_controls

_T = TypeVar("_T")

DEFAULT_SILENCE_S = 600.0
KEY_VARIABLE = "GPUPOOL_API_KEY"
_CONNECT_TIMEOUT_S = 10.0
# The comment of the frontend, see docs/api.md.
_WAIT = re.compile(
    rb": gpupool waiting(?: place=(\d{1,9}))?(?: estimate_s=(\d{1,9}(?:\.\d{1,3})?))?"
)
_ERRORS: dict[int, type[GpupoolError]] = {
    400: UsageError,
    401: Refused,
    403: Refused,
    404: NoSuchModel,
    409: Refused,
    422: UsageError,
    429: Unavailable,
    503: Unavailable,
    504: TimedOut,
}


_HINTS = {
    401: f"put a key into ${KEY_VARIABLE}; `gpupool key add NAME` creates a key",
    404: "see `gpupool list`",
}


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


@dataclass(frozen=True, slots=True)
class ChatServer:
    """The server's address, API key, and for HTTPS the server's own ``certificate``."""

    http_url: str
    key: str | None = field(default=None, repr=False)
    certificate: str | None = None

    def client(self, timeout: httpx.Timeout) -> httpx.Client:
        """Return an HTTP client for the server. Raises Failed: the certificate cannot be read."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(
            timeout=timeout,
            trust_env=False,
            headers=headers,
            verify=True if self.certificate is None else _trusting(self.certificate),
        )


def _trusting(certificate: str) -> ssl.SSLContext:
    """Return an SSL context that trusts exactly this certificate, under any host name.

    The certificate comes from the daemon on this machine; its host name does not matter over the
    loopback address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:
        raise Failed(f"the server's certificate {certificate} cannot be read: {error}") from error
    return context


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A question. ``silence_s`` is the longest wait for the next piece of the answer."""

    model: str
    prompt: str
    system: str | None = None
    max_tokens: int | None = None
    silence_s: float = DEFAULT_SILENCE_S

    def body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_completion_tokens"] = self.max_tokens
        return body


@dataclass(frozen=True, slots=True)
class ChatWait:
    """The wait for the first token: the place on the device, from 1, and seconds; None: unknown."""

    place: int | None
    estimate_s: float | None


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A piece of the answer; the numbers of tokens and the reason to finish come at the end alone.

    A piece with ``wait`` has no text: the answer has not begun.
    """

    text: str = ""
    reasoning: str = ""
    request_id: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    wait: ChatWait | None = None


def stream_chat(server: ChatServer, request: ChatRequest) -> Iterator[ChatPiece]:
    """Yield the pieces of the answer as they arrive.

    Raises:
        NoSuchModel, UsageError, Refused, Unavailable, Failed: the server's error.
        TimedOut: no piece arrived for ``request.silence_s``.
    """
    url = f"{server.http_url.rstrip('/')}/v1/chat/completions"
    timeout = httpx.Timeout(_CONNECT_TIMEOUT_S, read=request.silence_s)
    try:
        with (
            server.client(timeout) as client,
            client.stream("POST", url, json=request.body()) as response,
        ):
            if response.is_error:
                response.read()
                raise _error(response.status_code, response.text)
            yield from _pieces(response)
    except httpx.TimeoutException as error:
        raise TimedOut(
            f"{url} sent no data for {request.silence_s:g} s",
            "`gpupool why MODEL` shows the reason; or raise --timeout",
        ) from error
    except httpx.ConnectError as error:
        raise Unavailable(f"cannot connect to {url}: {error}", "see `gpupool status`") from error
    except httpx.RequestError as error:
        raise Failed(f"{url} broke off: {error}", "see `gpupool logs`") from error


def _pieces(response: httpx.Response) -> Iterator[ChatPiece]:
    for data in _sse_data(split_lines(response.iter_bytes())):
        if isinstance(data, ChatWait):
            yield ChatPiece(wait=data)
            continue
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise Failed(f"the server sent a chunk that is not JSON: {data[:80]!r}") from error
        if "error" in chunk:
            raise _error(_status_of(chunk["error"]), data.decode(errors="replace"))
        yield _piece(chunk)
    raise Failed("the answer ended early", "see `gpupool events` and `gpupool logs`")


def _sse_data(lines: Iterator[bytes]) -> Iterator[bytes | ChatWait]:
    """The data of each server-sent event, and waits from comments; other fields are skipped."""
    data: list[bytes] = []
    for line in lines:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data.clear()
        elif found := _WAIT.fullmatch(line):
            place, estimate_s = found.groups()
            yield ChatWait(int(place) if place else None, float(estimate_s) if estimate_s else None)
    if data:
        yield b"\n".join(data)


def _piece(chunk: dict[str, Any]) -> ChatPiece:
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    usage = chunk.get("usage") or {}
    return ChatPiece(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        request_id=chunk.get("id"),
        finish_reason=choices[0].get("finish_reason"),
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_tokens=usage.get("completion_tokens"),
    )


def _status_of(error: object) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _error(http_status: int, body: str) -> GpupoolError:
    """Return the error of an answer with ``http_status``, with the server's text."""
    try:
        answer = json.loads(body)
        message = str((answer.get("error") or answer)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        message = body.strip()[:200] or f"HTTP {http_status} without a reason"
    kind = _ERRORS.get(http_status, Failed)
    return kind(message, _HINTS.get(http_status, ""))
