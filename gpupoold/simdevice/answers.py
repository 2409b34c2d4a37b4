"""Requests on a simulated device, by model."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpupoold.simdevice.synthetic import Vocabulary


@dataclass(slots=True, eq=False)
class Answer:
    """A request on the device."""

    request_id: str
    model: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    num_tokens: int = 0
    """Number of tokens; positive at the start for a request of a dead device."""
    is_gone: bool = False

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.num_tokens

    @property
    def is_done(self) -> bool:
        """True if all tokens exist."""
        return self.num_tokens >= self.max_tokens


@dataclass(slots=True)
class Work:
    """A model's requests here. ``batch`` is ``running`` as of the last step."""

    vocabulary: Vocabulary
    waiting: list[Answer] = field(default_factory=list)
    running: list[Answer] = field(default_factory=list)
    prefilling: Answer | None = None
    batch: tuple[Answer, ...] | None = None

    def all(self) -> list[Answer]:
        """Return every request, including the one in prefill."""
        return [*([self.prefilling] if self.prefilling else ()), *self.waiting, *self.running]
