"""A worker's process before torch and vLLM are imported: environment variables, ranks of a group.

The leader of a group forks one process per further rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import mmap
import os
import select
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpupoold.errors import Failed
from gpupoold.memory.group.link import Link
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel

ENGINE_ARGUMENTS = "GPUPOOL_ENGINE_ARGUMENTS"

_logger = logging.getLogger(__name__)

# A worker counts the pages and bytes of one rank, which are equal on all ranks. The daemon sees the
# group as one device: with the memory of all its GPUs, whole models, and the rate of all links.
_COUNTED = (
    m.WorkerReady,
    m.ModelLoaded,
    m.ModelUnloaded,
    m.MemoryReport,
    m.TurnReport,
    m.Switched,
    m.WorkerStatus,
)
_ENDINGS = ("_bytes", "_bytes_per_s", "_bytes_per_token")


def set_engine_environment(log_level: str) -> None:
    """Prepare ``os.environ``, before vLLM is imported or again after a fork."""
    # FlashInfer compiles its sampler at the first request with top-p or top-k, which is after the
    # self-check, and needs nvcc, ninja and g++ on the PATH. vLLM's Triton kernel gives the same
    # results.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        # vLLM's records go to the process's handler, which replaces control characters.
        VLLM_CONFIGURE_LOGGING="0",
        VLLM_LOGGING_LEVEL=log_level.upper(),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )
    # vLLM turns breakable graphs on for some models after reading the model's configuration. But
    # the attention module reads the setting at import, so graphs turned on later would contain
    # attention with the batch of the capture.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    # Never reached: ``grammars.py`` bounds the caches of all engines of the process together.
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = "4096"
    # vLLM reads the level at import, perhaps before a fork, in a process with a different level.
    logging.getLogger("vllm").setLevel(log_level.upper())


def set_group_environment() -> None:
    """Turn off the all-reduces that depend on one model's sizes or graphs, unless set.

    To be called before the process groups are made.
    """
    # FlashInfer's workspace has the size of the first model of the process, and the creation is
    # collective, at the first step that needs the workspace.
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    # NCCL registers the buffers of captured collectives with the peers, and forgets these at some
    # call after the graph's end. Meanwhile torch frees the memory, which the peers still map.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def engine_arguments(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return further arguments of vLLM's engines, for tests and benchmarks.

    The variable ``GPUPOOL_ENGINE_ARGUMENTS`` has a JSON object such as ``{"max_num_seqs": 16}``.

    Raises:
        Failed: the value is not a JSON object.
    """
    text = environment.get(ENGINE_ARGUMENTS, "{}")
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise Failed(f"${ENGINE_ARGUMENTS} is not JSON: {error}", f"it is {text!r}") from error
    if not isinstance(arguments, dict):
        raise Failed(f"${ENGINE_ARGUMENTS} is not a JSON object", f"it is {text!r}")
    return arguments


def preload(log_level: str) -> None:
    """Import the engine; device, model and threads are chosen later."""
    set_engine_environment(log_level)
    for name in ("calls", "engine.emulated_worker", "engine.scheduler"):
        importlib.import_module(f"gpupoold.worker.{name}")


class RankLinks(NamedTuple):
    """A follower's links with the leader; each end is for one thread."""

    orders: Link
    loads: Link
    files: Link


class Followers:
    """The processes of a leader's followers, by rank from 1 on."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._are_wanted = True

    def watch(self) -> None:
        """End this process when a follower ends, from a thread.

        The rest of the group cannot go on. This process ends with the follower's status, or by
        SIGKILL as the follower did, so that the daemon finds the reason.
        """
        if self.pids:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def kill(self) -> None:
        """Kill the followers, so that their memory is free when this process has ended."""
        self._are_wanted = False
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _watch(self) -> None:
        pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids, 1)}
        [first, *_], _, _ = select.select(list(pidfds), [], [])
        if not self._are_wanted:
            return
        rank = pidfds[first]
        pid = self.pids.pop(rank - 1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        text = f"signal {-code}" if code < 0 else f"status {code}"
        _logger.error("rank %d of the group has ended (%s); the group ends", rank, text)
        self.kill()
        logging.shutdown()
        if code == -signal.SIGKILL:  # perhaps by the kernel, short of memory
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code if code > 0 else 1)


class Rank(NamedTuple):
    """This process's place in its group.

    ``store`` is the empty file in which the ranks find each other; ``unpinned`` is shared memory,
    by rank, for the bytes of host memory that a follower has not pinned. A leader has rank 0, the
    links to each follower, and the followers' processes; a follower has its links to the leader.
    """

    rank: int
    num_ranks: int
    store: Path
    unpinned: memoryview
    links: tuple[RankLinks, ...]
    followers: Followers


def fork_ranks(num_ranks: int, leader_fds: list[int]) -> Rank:
    """Fork the followers; return in each process its rank.

    To be called before the process has threads. Followers close ``leader_fds``.
    """
    followers = Followers()
    if num_ranks == 1:
        return Rank(0, 1, Path(), memoryview(b""), (), followers)
    store = Path(f"/proc/self/fd/{os.memfd_create('gpupool-ranks')}")
    unpinned = memoryview(mmap.mmap(-1, num_ranks * 8)).cast("Q")
    ours: list[RankLinks] = []
    for rank in range(1, num_ranks):
        pairs = [Link.pair() for _ in RankLinks._fields]
        pid = os.fork()
        if pid == 0:
            leaders = (*(link for links in ours for link in links), *(link for link, _ in pairs))
            for link in leaders:
                link.close()
            for fd in leader_fds:
                os.close(fd)
            links = RankLinks(*(other for _, other in pairs))
            return Rank(rank, num_ranks, store, unpinned, (links,), Followers())
        for _, other in pairs:
            other.close()
        ours.append(RankLinks(*(link for link, _ in pairs)))
        followers.pids.append(pid)
    return Rank(0, num_ranks, store, unpinned, tuple(ours), followers)


class GroupChannel(BlockingChannel[m.ToWorker]):
    """The channel of a group's leader with the daemon, in bytes of the whole group."""

    num_ranks = 1

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        if self.num_ranks > 1 and isinstance(message, _COUNTED):
            message = of_group(message, self.num_ranks)
        super().send(message, fds)


def of_group(message: Any, num_ranks: int) -> Any:
    """Return a message with its bytes, and those of the records inside, times ``num_ranks``."""
    changes: dict[str, Any] = {}
    for name in _names(message):
        value = getattr(message, name)
        if name.endswith(_ENDINGS):
            changes[name] = _times(value, num_ranks)
        elif _names(value):
            changes[name] = of_group(value, num_ranks)
        elif isinstance(value, list) and value and _names(value[0]):
            changes[name] = [of_group(part, num_ranks) for part in value]
    if isinstance(message, msgspec.Struct):
        return msgspec.structs.replace(message, **changes)
    return dataclasses.replace(message, **changes)


def _names(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a struct or dataclass, none for other values."""
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return getattr(value, "__struct_fields__", ())


def _times(value: Any, num_ranks: int) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: size * num_ranks for name, size in value.items()}
    return value * num_ranks
