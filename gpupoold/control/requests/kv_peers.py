"""KV in the host memory of other workers: introductions and transfers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpupoold.control.workers.worker import Worker
from gpupoold.wire import messages as m


class KvPeers:
    """Introduces workers to the host memory of other workers, and releases KV after a read.

    ``transfers`` has the source and the target of each readable KV transfer. A transfer may outlive
    the request.
    """

    def __init__(self, workers: Mapping[int, Worker]) -> None:
        self._workers = workers
        self._introduced: set[tuple[int, int]] = set()  # (source, target)
        self.transfers: dict[str, tuple[int, int]] = {}

    def introduce(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Give each target access to the host memory of each source of coming requests.

        Each pair is introduced once, and only where requests migrate: the target's GPU pins the
        whole host memory, 0.1 s per GB; until then the target gets requests without KV. Groups of
        different sizes are not introduced.
        """
        numbers = list(targets)
        for source in sources:
            for target in numbers:
                if source != target and (source, target) not in self._introduced:
                    self._introduce(source, target)

    def share_prefixes(self, number: int) -> None:
        """Let a new worker and the others read each other's KV of ended requests."""
        worker = self._workers[number]
        for other in self._workers.values():
            if other is not worker and self.have_equal_parts(number, other.number):
                for reader, source in ((other, worker), (worker, other)):
                    if reader.is_ready and source.kv_host_fd is not None:
                        reader.send(m.PrefixPeer(source.number), (source.kv_host_fd,))

    def register(self, transfer: m.KvTransfer | None, source: int, target: int) -> None:
        """Record the KV of a request for the target to read from the source."""
        if transfer is not None:
            self.transfers[transfer.transfer_id] = source, target

    def have_equal_parts(self, source: int, target: int) -> bool:
        """Return whether KV of one worker is of use on the other.

        The ranks of groups of different sizes have different parts of the KV, which is computed
        anew.
        """
        return self._workers[source].device.num_gpus == self._workers[target].device.num_gpus

    def used(self, transfer_id: str) -> None:
        """Release KV without further use by the target."""
        source, _ = self.transfers.pop(transfer_id, (None, None))
        if source is not None:
            self._send(source, m.ReleaseKvTransfer(transfer_id))

    def worker_down(self, number: int) -> None:
        """Release the KV meant for a dead worker; forget the KV of the dead worker."""
        for transfer_id, (source, target) in list(self.transfers.items()):
            if number in (source, target):
                del self.transfers[transfer_id]
            if number == target:
                self._send(source, m.ReleaseKvTransfer(transfer_id))
        for source, target in list(self._introduced):
            if number in (source, target):
                self._introduced.discard((source, target))
            if number == source:
                self._send(target, m.PeerDown(number))

    def _introduce(self, source: int, target: int) -> None:
        worker, to = self._workers.get(source), self._workers.get(target)
        if worker is None or to is None or not (worker.is_ready and to.is_ready):
            return
        if not self.have_equal_parts(source, target):
            return
        ready = worker.ready
        if worker.kv_host_fd is not None and ready is not None and ready.facts.kv_host_limit_bytes:
            to.send(m.PeerHost(source, ready.facts.kv_host_limit_bytes), (worker.kv_host_fd,))
            self._introduced.add((source, target))

    def _send(self, number: int, message: m.Message) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.send(message)
