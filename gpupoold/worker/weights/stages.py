"""The stages of a load, and their times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

from gpupoold.durations import LoadStages


class LoadStage(StrEnum):
    """The stages of a load, named as the fields of ``LoadStages``; "the worker ..."."""

    BUILD = "builds the engine"
    READ = "reads the weights"
    SNAPSHOT = "makes the snapshot"
    COMPILE = "compiles"
    CAPTURE = "captures graphs"
    CHECK = "runs the self-check"
    PROFILE = "times steps"


_ON_DEVICE = (LoadStage.BUILD, LoadStage.READ, LoadStage.SNAPSHOT)


class StageClock:
    """The present stage of a load, which any thread may read, and the time of each stage."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self.stage = LoadStage.BUILD
        self.why_on_device = ""
        """Why the load needs device memory for all weights at once, if so."""
        self._clock = clock
        self._since_s = clock()
        self._stages = LoadStages()

    @contextlib.contextmanager
    def during(self, stage: LoadStage) -> Iterator[None]:
        """Count the time inside the context for ``stage`` alone, not for the stage around."""
        around = self.stage
        self._enter(stage)
        try:
            yield
        finally:
            self._enter(around)

    @contextlib.contextmanager
    def during_calls(self, stage: LoadStage, owner: Any, name: str) -> Iterator[None]:
        """Count the time of calls of ``owner``'s function ``name`` inside the context."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.during(stage):
                return function(*arguments, **options)

        with replaced(owner, name, timed):
            yield

    @property
    def text(self) -> str:
        """The present stage, and why the load takes pages of other models, if so."""
        if not self.why_on_device or self.stage not in _ON_DEVICE:
            return self.stage.value
        return f"{self.stage.value} in device memory, because {self.why_on_device}"

    def so_far(self) -> LoadStages:
        """Return the time of each stage until now."""
        self._enter(self.stage)
        return self._stages

    def _enter(self, stage: LoadStage) -> None:
        now_s, field = self._clock(), f"{self.stage.name.lower()}_s"
        setattr(self._stages, field, getattr(self._stages, field) + now_s - self._since_s)
        self.stage, self._since_s = stage, now_s


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let ``owner``, a class, a module or an object, have another value inside the context."""
    former, was_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, former)
        else:
            delattr(owner, name)
