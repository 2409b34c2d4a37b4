"""The fields of a client's request that the entrance needs."""

from __future__ import annotations

import msgspec

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# Their answers have chunks with choices.
CHOICES_PATHS = frozenset({CHAT, COMPLETIONS})


class _Tool(msgspec.Struct):
    type: str = ""


_tools = msgspec.json.Decoder(list[_Tool] | None)


class Wanted(msgspec.Struct):
    """The fields of a client's request for routing and continuation."""

    model: str = ""
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None
    background: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    input: msgspec.Raw = msgspec.Raw(b"null")
    include: msgspec.Raw = msgspec.Raw(b"null")
    tools: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    def can_continue(self, path: str) -> bool:
        """Return whether a different node could continue the answer after the first events."""
        if not self.stream:
            return False
        if path == RESPONSES:
            return (
                not self.background
                and b"logprobs" not in bytes(self.include)
                and self._has_only_functions()
            )
        return path == MESSAGES or (path in CHOICES_PATHS and self._choices_can_continue())

    def _choices_can_continue(self) -> bool:
        prompt = bytes(self.prompt).lstrip()
        is_one = not prompt.startswith(b"[") or prompt[1:].lstrip()[:1].isdigit()
        return is_one and not self.echo and self.best_of in (None, 1)

    def _has_only_functions(self) -> bool:
        """Return whether only the client calls tools; the node's calls cannot be repeated."""
        try:
            tools = _tools.decode(self.tools)
        except msgspec.MsgspecError:  # the node tells the client
            return False
        return all(tool.type == "function" for tool in tools or ())
