"""The two servers of a comparison: gpupool, and ``vllm serve``, with one checkpoint at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.bench.overhead import EMULATED_OPTIONS, vllm_serve
from benchmarks.bench.rig import emulated_config
from benchmarks.judges.arguments import DTYPE, ServerArguments
from benchmarks.private_daemon import PrivateDaemon, private_daemon

_DEVICE_BYTES = 400_000_000
_START_TIMEOUT_S = 900.0


class Server(Protocol):
    """One of the two servers."""

    def serving(
        self, checkpoint: Path, names: Sequence[str], wanted: ServerArguments
    ) -> contextlib.AbstractContextManager[str]:
        """Serve a checkpoint under names; yield the URL. No other model is served meanwhile."""
        ...


class GpupoolServer:
    """A daemon, whose only model is replaced for each set of arguments."""

    def __init__(self, daemon: PrivateDaemon) -> None:
        self._daemon = daemon

    @contextlib.contextmanager
    def serving(
        self, checkpoint: Path, names: Sequence[str], wanted: ServerArguments
    ) -> Iterator[str]:
        """See :class:`Server`."""
        first, *aliases = names
        self._daemon.add_model(
            first,
            checkpoint,
            aliases=aliases,
            dtype=DTYPE,
            max_model_len=wanted.max_model_len,
            engine=wanted.gpupool_engine,
        )
        try:
            yield self._daemon.http_url
        finally:
            with self._daemon.client() as client:
                client.remove_model(first, "force")


class VllmServer:
    """A new ``vllm serve`` for each set of arguments; its log is below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def serving(
        self, checkpoint: Path, names: Sequence[str], wanted: ServerArguments
    ) -> Iterator[str]:
        """See :class:`Server`."""
        options = [*_vllm_words(wanted), "--served-model-name", *names]
        log_path = self._folder / "vllm.log"
        with vllm_serve(checkpoint, wanted.max_model_len, DTYPE, options, log_path) as url:
            yield url


@contextlib.contextmanager
def running(target: str, folder: Path) -> Iterator[Server]:
    """Yield ``gpupool`` or ``vllm``, with its files below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if target == "vllm":
        yield VllmServer(folder)
        return
    config = emulated_config(_DEVICE_BYTES)
    with private_daemon(config, folder / "daemon", _START_TIMEOUT_S) as daemon:
        yield GpupoolServer(daemon)


def _vllm_words(wanted: ServerArguments) -> list[str]:
    """The options after those that gpupool sets on a CPU, so that the test's come last."""
    return [*EMULATED_OPTIONS, "--seed", "0", *wanted.vllm_words]
