"""Use of API keys on other nodes, so that the rates of a key hold for a fleet. Pure.

Each daemon counts the use of keys with rates since its start. The controller adds the counts, and
returns to each node the use on the other nodes; the node's agent charges the growth to the buckets
of the daemon. All messages have sums, so that a lost message is made good by the next.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpupoold.access.rate_use import RateUse

_NONE = RateUse()


class RateSums:
    """The use of all keys on all nodes since the start of the controller."""

    def __init__(self) -> None:
        self._counted: dict[str, Mapping[str, RateUse]] = {}
        self._grown: dict[str, dict[str, RateUse]] = {}
        self._total: dict[str, RateUse] = {}

    def counted(self, node: str, uses: Mapping[str, RateUse]) -> None:
        """Add the growth of a node's counts; the first counts of a node are where growth begins."""
        before = self._counted.get(node)
        self._counted[node] = dict(uses)
        if before is None:
            return
        sums = self._grown.setdefault(node, {})
        for key_id, use in uses.items():
            growth = _growth(use, before.get(key_id, _NONE))
            if growth != _NONE:
                sums[key_id] = sums.get(key_id, _NONE) + growth
                self._total[key_id] = self._total.get(key_id, _NONE) + growth

    def elsewhere(self, node: str) -> dict[str, RateUse]:
        """Return the use of each key on the other nodes."""
        own = self._grown.get(node, {})
        rest = {key_id: use - own.get(key_id, _NONE) for key_id, use in self._total.items()}
        return {key_id: use for key_id, use in rest.items() if use != _NONE}


class RateGrowth:
    """The growth of the use elsewhere, on one node."""

    def __init__(self) -> None:
        self._epoch = -1
        self._known: dict[str, RateUse] = {}

    def due(self, epoch: int, elsewhere: Mapping[str, RateUse]) -> dict[str, RateUse]:
        """Return the use to charge now; nothing for the first sums of a controller's epoch.

        Sums that arrive late are smaller than known sums and are ignored.
        """
        is_first, self._epoch = epoch != self._epoch, epoch
        if is_first:
            self._known = dict(elsewhere)
            return {}
        due = {}
        for key_id, use in elsewhere.items():
            known = self._known.get(key_id, _NONE)
            latest = RateUse(*map(max, use, known))
            self._known[key_id] = latest
            if latest != known:
                due[key_id] = latest - known
        return due


def _growth(use: RateUse, before: RateUse) -> RateUse:
    """Return the growth of counts; smaller counts than before are those of a new daemon."""
    has_restarted = use.num_requests < before.num_requests or use.num_tokens < before.num_tokens
    return use if has_restarted else use - before
