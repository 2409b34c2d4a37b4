"""The leader's orders to the other ranks of its group, carried out in the order of sending.

An order is the name of a method of the followers and its arguments. Orders have no answer: the
leader goes on at once, a follower that fails ends its process, and the group ends with it. Other
threads of the leader have links of their own to each follower (*side links*). A message on such a
link says how many orders were sent before, and the follower carries out these first.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any

from gpupoold.memory.group.link import Link


class OrderBook:
    """The leader's end of the links for orders; callable by all threads."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._num_sent = 0

    @property
    def num_followers(self) -> int:
        return len(self._links)

    @property
    def num_sent(self) -> int:
        """Number of orders so far, which side messages carry."""
        return self._num_sent

    def send(self, method: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        """Order all followers to call a method.

        Raises:
            RankLost: a follower has ended.
        """
        pickled = pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._num_sent += 1
            for link in self._links:
                link.send_bytes(pickled, fds)

    def send_each(self, method: str, fds: Sequence[int], *arguments: Any) -> None:
        """Order each follower to call a method, with a descriptor of its own."""
        pickled = pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._num_sent += 1
            for link, fd in zip(self._links, fds, strict=True):
                link.send_bytes(pickled, [fd])


class OrderCount:
    """The number of orders that a follower has carried out, for its other threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_done = 0

    def add(self) -> None:
        """Count one more order."""
        with self._condition:
            self._num_done += 1
            self._condition.notify_all()

    def wait_for(self, num_orders: int) -> None:
        """Return when this many orders have been carried out."""
        if self._num_done >= num_orders:
            return
        with self._condition:
            self._condition.wait_for(lambda: self._num_done >= num_orders)
