"""Places that owners share: work at once of a limited number, with a part left to newcomers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

_OWNER_SHARE, _GROUP_SHARE = 7, 3


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    group: str
    granted: asyncio.Future[None] = field(default_factory=asyncio.Future)


class Places:
    """``num`` places, shared between owners and, of each owner, between groups.

    An owner holds fewer places than ``owner_share`` times those that are free, and a group fewer
    than ``group_share`` times: with 64 places and the default shares one group has at most 48, one
    owner at most 56, and a newcomer never waits for a place of somebody else to be released. A
    released place goes to the waiting owner with the fewest places, and there to the group with the
    fewest. For the event loop.
    """

    def __init__(
        self, num: int, owner_share: int = _OWNER_SHARE, group_share: int = _GROUP_SHARE
    ) -> None:
        self._num_free = num
        self._owner_share = owner_share
        self._group_share = group_share
        self._of_owner: Counter[str] = Counter()
        self._of_group: Counter[tuple[str, str]] = Counter()
        self._waiting: list[_Waiter] = []

    def num_waiting(self, owner: str) -> int:
        return sum(waiter.owner == owner for waiter in self._waiting)

    async def take(self, owner: str, group: str = "") -> None:
        """Take a place, to be released with the same arguments; wait for a place if necessary."""
        waiter = _Waiter(owner, group)
        self._waiting.append(waiter)
        self._hand_out()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._waiting.remove(waiter)
                self._hand_out()
            else:
                self.release(owner, group)
            raise

    def release(self, owner: str, group: str = "") -> None:
        self._num_free += 1
        self._count(owner, group, -1)
        self._hand_out()

    def _hand_out(self) -> None:
        while able := [waiter for waiter in self._waiting if self._may_take(waiter)]:
            waiter = min(able, key=self._num_held)
            self._waiting.remove(waiter)
            self._num_free -= 1
            self._count(waiter.owner, waiter.group, 1)
            waiter.granted.set_result(None)

    def _may_take(self, waiter: _Waiter) -> bool:
        of_owner, of_group = self._num_held(waiter)
        return (
            not waiter.granted.done()
            and of_owner < self._owner_share * self._num_free
            and of_group < self._group_share * self._num_free
        )

    def _num_held(self, waiter: _Waiter) -> tuple[int, int]:
        return self._of_owner[waiter.owner], self._of_group[waiter.owner, waiter.group]

    def _count(self, owner: str, group: str, change: int) -> None:
        """Change the counts; those that reach 0 are removed."""
        for counts, key in ((self._of_owner, owner), (self._of_group, (owner, group))):
            counts[key] += change  # type: ignore[index]
            if not counts[key]:  # type: ignore[index]
                del counts[key]  # type: ignore[arg-type]
