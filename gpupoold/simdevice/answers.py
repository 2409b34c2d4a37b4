"""Requests on a simulated device, and what a model has of them."""

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
    """Those that it has; not 0 at first if it comes from a device that has died."""
    is_gone: bool = False

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.num_tokens

    @property
    def is_done(self) -> bool:
        """True if it has all its tokens."""
        return self.num_tokens >= self.max_tokens


@dataclass(slots=True)
class Work:
    """A model's requests here. ``batch`` is ``running`` as the last step had it."""

    vocabulary: Vocabulary
    waiting: list[Answer] = field(default_factory=list)
    running: list[Answer] = field(default_factory=list)
    prefilling: Answer | None = None
    batch: tuple[Answer, ...] | None = None

    def all(self) -> list[Answer]:
        """Every request, the one being prefilled too."""
        return [*([self.prefilling] if self.prefilling else ()), *self.waiting, *self.running]
