"""A streamed chat completion from the OpenAI HTTP API."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

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


@dataclass(frozen=True, slots=True)
class ChatServer:
    """The server's address, API key, and for HTTPS the server's own ``certificate``."""

    http_url: str
    key: str | None = field(default=None, repr=False)
    certificate: str | None = None

    def client(self, timeout: httpx.Timeout) -> httpx.Client:
        """Return an HTTP client for the server.

        Raises:
            Failed: the certificate cannot be read.
        """
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
        """The JSON body of the HTTP request."""
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
