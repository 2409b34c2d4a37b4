"""A line per answer in progress, with a bar and the devices that served the answer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.demo.answers import Answer
from gpupoold.api.schemas import Ps

BAR_WIDTH = 28


class Bars:
    """A bar for each prompt; all answers have ``num_tokens`` tokens."""

    def __init__(self, console: Console, prompts: Sequence[Answer], num_tokens: int) -> None:
        self.progress = Progress(
            TextColumn("   {task.description}"),
            BarColumn(BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[where]}"),
            console=console,
        )
        self._tasks = [
            self.progress.add_task(prompt.model, total=num_tokens, where="") for prompt in prompts
        ]
        self._answers: list[Answer | None] = [None] * len(prompts)
        self._devices: list[list[int]] = [[] for _ in prompts]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(len(answer.token_ids) for answer in self._answers if answer)

    def on_token(self, index: int, answer: Answer) -> None:
        """Show a further token of the answer to prompt ``index``."""
        self._answers[index] = answer
        self.progress.advance(self._tasks[index])

    def show_devices(self, now: Ps) -> None:
        """Show the device of every answer."""
        for index, answer in enumerate(self._answers):
            for request in now.requests:
                if request.device is None or answer is None or not answer.is_of(request):
                    continue
                been = self._devices[index]
                if been[-1:] != [request.device]:
                    been.append(request.device)
                    text = "device " + " → ".join(map(str, been))
                    self.progress.update(self._tasks[index], where=text)
