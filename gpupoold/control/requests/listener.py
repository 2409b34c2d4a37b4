"""Calls from live requests to the parts that manage models."""

from __future__ import annotations

from gpupoold.wire.messages import GrammarRefused, WrongAnswer


class RequestListener:
    """Takes the dispatcher's reports about a model's requests; this class ignores all reports."""

    def request_began(self, model: str) -> None:
        """Handle the arrival of a request."""

    def request_ended(self, model: str, device: int | None) -> None:
        """Handle the end of a request; ``device`` is None if no device had the request."""

    def weights_wanted(self, model: str) -> None:
        """Handle the wait of a request until the model is warm."""

    def weights_damaged(self, answer: WrongAnswer) -> None:
        """Handle a failed self-check."""

    def grammar_refused(self, refused: GrammarRefused) -> None:
        """Handle a grammar that has exceeded a bound in a worker."""

    def answered(self, model: str) -> None:
        """Handle an end without an error, or progress beyond the token of an earlier crash."""

    def convicted(self, model: str, request_id: str) -> None:
        """Handle the end of a request that crashed a worker when retried alone."""

    def acquitted(self, model: str) -> None:
        """Handle a crash whose suspects are all cleared: the crash counts for the model."""
