"""Users and groups by name, looked up on a thread.

The system's tables may be on the network (SSSD, LDAP, NIS), where a look-up has no time limit. A
thread makes the look-ups; results stay valid while the next look-up runs.
"""

from __future__ import annotations

import asyncio
import grp
import pwd
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_AGE_S = 60.0
_MAX_ANSWERS = 1024

_Question = tuple[Literal["group", "user"], Any]
_Answer = int | str | None


def group_id(name: str) -> int | None:
    """Return the number of a group, None if no group has this name; blocks."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def user_name(user_id: int) -> str:
    """Return a user's name, or the number as text if no name exists; blocks."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


@dataclass(eq=False)
class NameService:
    """Results of the latest look-ups in the system's tables; no method blocks.

    ``find_group`` and ``find_user`` may block: a daemon thread calls them.
    """

    find_group: Callable[[str], int | None] = group_id
    find_user: Callable[[int], str] = user_name
    # With the time of the answer.
    _answers: dict[_Question, tuple[float, _Answer]] = field(default_factory=dict, init=False)
    _asked: dict[_Question, Future[None]] = field(default_factory=dict, init=False)
    _questions: queue.SimpleQueue[_Question] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def group_id(self, name: str, max_age_s: float = MAX_AGE_S) -> int | None:
        """Return the number of a group, None if no group has this name or no result is known yet.

        A result older than ``max_age_s`` is refreshed for the next caller.
        """
        found = self._look(("group", name), max_age_s)
        return found if isinstance(found, int) else None

    def user_name(self, user_id: int, max_age_s: float = MAX_AGE_S) -> str:
        """Return a user's name, or the number as text if no name is known."""
        found = self._look(("user", user_id), max_age_s)
        return found if isinstance(found, str) else str(user_id)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until all look-ups have ended; return False after ``timeout_s``."""
        asked = [asyncio.wrap_future(one) for one in list(self._asked.values())]
        if not asked:
            return True
        _, unknown = await asyncio.wait(asked, timeout=timeout_s)
        return not unknown

    def _look(self, question: _Question, max_age_s: float) -> _Answer:
        found_s, answer = self._answers.get(question, (float("-inf"), None))
        if time.monotonic() - found_s > max_age_s:
            self._ask(question)
        return answer

    def _ask(self, question: _Question) -> None:
        if question in self._asked or len(self._asked) >= _MAX_ANSWERS:
            return
        self._asked[question] = Future()
        self._questions.put(question)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="names", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            question = self._questions.get()
            try:
                kind, of = question
                answer = self.find_group(of) if kind == "group" else self.find_user(of)
            except OSError:  # no answer now: keep the previous answer
                answer = self._answers.get(question, (0.0, None))[1]
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            self._answers[question] = time.monotonic(), answer
            self._asked.pop(question).set_result(None)
