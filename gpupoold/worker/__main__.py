"""``python -m gpupoold.worker``: the process that the daemon starts for each device."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import socket
from pathlib import Path
from typing import NoReturn

from gpupoold.domain import DeviceFacts
from gpupoold.engine_versions import check_engine_version
from gpupoold.errors import Failed
from gpupoold.memory.device import Device
from gpupoold.memory.group.link import RankLost
from gpupoold.memory.pages import OutOfPages
from gpupoold.system.activity import WORKER
from gpupoold.system.process import (
    EMULATED_DEVICE_NICENESS,
    OUT_OF_DEVICE_MEMORY_STATUS,
    OUT_OF_MEMORY_STATUS,
    WORKER_OOM_SCORE_ADJ,
    as_words,
    begin_child,
    end_at_faults,
    importing,
    lower_priority,
    raise_oom_score,
    show_as,
)
from gpupoold.wire.channel import ChannelClosed
from gpupoold.wire.messages import ToWorker, WorkerReady
from gpupoold.worker.process import GroupChannel, Rank, fork_ranks, set_engine_environment

_logger = logging.getLogger("gpupoold.worker")

# The errors of CUDA and of torch's CPU allocator are RuntimeErrors. CUDA's libraries have a status
# of their own for a lack of memory.
_SAID_BY_TORCH = (
    *("out of memory", "can't allocate memory", "cannot allocate memory"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed"),
)


def main() -> None:
    """Serve with one device until ``Shutdown`` arrives or the daemon ends."""
    arguments = _parse()
    fds = (arguments.wire_fd, arguments.activity_fd, arguments.kv_host_fd)
    rank = fork_ranks(arguments.num_gpus, [fd for fd in fds if fd is not None])
    if rank.rank:
        begin_child(f"worker rank {rank.rank}", arguments.log_level)
        place = {"--device": arguments.device, "--rank": rank.rank}
        show_as("gpupoold.worker.follower", as_words(place))
    else:
        begin_child("worker", arguments.log_level, arguments.parent_pid)
        rank.followers.watch()
    raise_oom_score(WORKER_OOM_SCORE_ADJ)
    if arguments.device_kind == "emulated":
        lower_priority(EMULATED_DEVICE_NICENESS)
    if arguments.activity_fd is not None and not rank.rank:
        WORKER.attach(arguments.activity_fd)
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.compute_threads))
    set_engine_environment(arguments.log_level)
    if arguments.device_kind == "cuda":
        _show_gpus([int(index) for index in arguments.gpus.split(",")])
    if rank.rank:
        _follow(arguments, rank)
    channel = GroupChannel(socket.socket(fileno=arguments.wire_fd), ToWorker)
    channel.num_ranks = rank.num_ranks
    try:
        _serve(arguments, rank, channel)
    except ChannelClosed as closed:
        _logger.info("the daemon has closed the connection (%s); exiting", closed)
    except Exception as error:
        _leave_if_out_of_memory(error, rank)
        _logger.exception("the worker ends")
        _leave(1, rank)
    _leave(0, rank)


def _follow(arguments: argparse.Namespace, rank: Rank) -> NoReturn:
    """Carry out the orders of the group's leader until the leader ends."""
    try:
        with importing():
            from gpupoold.worker.follower import follow
        end_at_faults()
        follow(rank, _open_device(arguments, rank))
    except RankLost:
        _leave(0, rank)
    except Exception as error:
        _leave_if_out_of_memory(error, rank)
        _logger.exception("the follower ends")
    _leave(1, rank)


def _leave(status: int, rank: Rank) -> NoReturn:
    """End the process at once.

    A normal exit would spend seconds on engines whose memory the kernel frees anyway, and wait for
    a load beside the turns.
    """
    logging.shutdown()
    rank.followers.kill()
    os._exit(status)


def _leave_if_out_of_memory(error: Exception, rank: Rank) -> None:
    status = memory_status(error)
    if status is None:
        return
    try:
        _logger.exception("out of memory")
        logging.shutdown()
        rank.followers.kill()
    finally:
        os._exit(status)  # also if there was no memory for logging


def memory_status(error: BaseException) -> int | None:
    """Return the exit status if an error, or any cause, is a lack of memory or pages, else None."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if (status := _status_of(one)) is not None:
            return status
        one = one.__cause__ or one.__context__
    return None


def _status_of(error: BaseException) -> int | None:
    if isinstance(error, MemoryError | OutOfPages):
        return OUT_OF_MEMORY_STATUS
    if isinstance(error, OSError):
        return OUT_OF_MEMORY_STATUS if error.errno == errno.ENOMEM else None
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or not any(said in text for said in _SAID_BY_TORCH):
        return None
    return OUT_OF_DEVICE_MEMORY_STATUS if "cuda" in text else OUT_OF_MEMORY_STATUS


def _serve(arguments: argparse.Namespace, rank: Rank, channel: GroupChannel) -> None:
    with importing():
        from gpupoold.memory.prefix_tiers import PrefixTiers
        from gpupoold.worker.calls import answer
        from gpupoold.worker.device import device_name
        from gpupoold.worker.turns.loop import TurnLoop
        from gpupoold.worker.turns.models import WorkerDevice
    end_at_faults()
    from gpupoold.memory.bandwidth import measure_far_share, measure_fill, measure_link
    from gpupoold.memory.host import KvHostCache
    from gpupoold.memory.pages import PagePool

    version = check_engine_version()
    device = _open_device(arguments, rank)
    links = None
    if rank.num_ranks > 1:
        from gpupoold.worker.weights.rank_loads import lead

        device, links = lead(rank, device)
    pool = PagePool(device.num_pages, device.table_pages)
    host = KvHostCache(
        arguments.kv_host_bytes, num_ranks=rank.num_ranks, former_fd=arguments.kv_host_fd
    )
    prefixes = None
    if host.budget_bytes and arguments.prefix_cache_bytes != 0:
        prefixes = PrefixTiers(
            host, arguments.prefix_cache_bytes, arguments.kv_files, arguments.kv_files_bytes
        )
    link = measure_link(device, pool)
    bandwidth = measure_fill(device, pool)
    far_share = measure_far_share(device, pool, link)
    host.pin(device)
    own = WorkerDevice(
        arguments.device,
        device,
        pool,
        host,
        prefixes,
        bandwidth,
        has_gpu_alone=arguments.num_sharing == 1,
        links=links,
    )
    loop = TurnLoop(own, channel, answer)
    channel.send(
        WorkerReady(
            DeviceFacts(
                device.num_pages * device.page_bytes,
                device.page_bytes,
                bandwidth,
                link.in_bytes_per_s,
                link.out_bytes_per_s,
                host.budget_bytes,
                tuple(device.rank_nodes),
                far_share,
            ),
            version,
            device_name(arguments.device_kind, rank.num_ranks),
            shares_kv_host=bool(host.budget_bytes),
            reserve_free_bytes=_reserve_free_bytes(device, arguments.spare_bytes),
        ),
        (host.fd,) if host.budget_bytes else (),
    )
    loop.run()


def _reserve_free_bytes(device: Device, spare_bytes: int) -> int | None:
    """Return the free memory outside the pages without ``spare_bytes``, for all engines."""
    free_bytes = device.free_bytes()
    return None if free_bytes is None else max(0, free_bytes - device.num_ranks * spare_bytes)


def _open_device(arguments: argparse.Namespace, rank: Rank) -> Device:
    from gpupoold.worker.device import open_device

    if arguments.device_kind == "emulated":
        with importing():
            from gpupoold.worker.engine.cpu_build import adapt_cpu_build
        adapt_cpu_build()
    else:
        from gpupoold.worker.threads import manage_torch_threads, use_step_threads

        if not arguments.are_threads_set:
            manage_torch_threads(arguments.compute_threads)
        use_step_threads()
    if rank.num_ranks > 1:
        from gpupoold.worker.engine.vllm_process import join_group, keep_generators

        may_spin = not arguments.are_cores_shared
        join_group(rank.store, rank.rank, rank.num_ranks, may_spin=may_spin)
        keep_generators()
    return open_device(
        arguments.device_kind,
        arguments.device_bytes,
        arguments.reserve_bytes + arguments.spare_bytes,
        arguments.page_bytes,
        rank.rank,
        arguments.link_bytes_per_s,
        arguments.pin_bytes_per_s,
        arguments.pinned_limit_bytes,
        arguments.locks,
    )


def _show_gpus(indices: list[int]) -> None:
    """Hide all GPUs except those with these indices among the visible ones; to be called before
    importing vLLM and torch.

    A worker sees the GPUs of its group, in the order of the ranks: vLLM puts rank ``r`` on the
    ``r``-th, and a hidden GPU cannot get a context by accident.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        chosen = [str(index) for index in indices]
    else:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
        if max(indices) >= len(entries):
            raise Failed(
                f"there is no CUDA device {max(indices)}: CUDA_VISIBLE_DEVICES is {visible!r}",
                "change the variable, or the device's index in the configuration",
            )
        chosen = [entries[index] for index in indices]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # indices as in nvidia-smi


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpupoold.worker")
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--activity-fd", type=int, help="see gpupoold.system.activity")
    parser.add_argument("--device-kind", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--gpus", default="0", help="CUDA ordinals in the order of the ranks")
    parser.add_argument("--are-cores-shared", type=int, default=0, help="1: more ranks than cores")
    parser.add_argument("--num-gpus", type=int, default=1, help="ranks of the group")
    parser.add_argument("--num-sharing", type=int, default=1, help="workers on the GPU")
    parser.add_argument("--device-bytes", type=int, required=True, help="0: all but the reserve")
    parser.add_argument("--reserve-bytes", type=int, default=0)
    parser.add_argument("--spare-bytes", type=int, default=0, help="free beside the reserve")
    parser.add_argument("--page-bytes", type=int, default=0)
    parser.add_argument("--link-bytes-per-s", type=int, default=0, help="of an emulated device")
    parser.add_argument("--pin-bytes-per-s", type=int, default=0, help="of an emulated device")
    parser.add_argument("--pinned-limit-bytes", type=int, default=-1, help="-1: no limit")
    parser.add_argument("--locks", type=Path, help="folder of files that all workers lock")
    parser.add_argument("--kv-host-bytes", type=int, required=True)
    parser.add_argument("--kv-host-fd", type=int, help="of the device's former worker")
    parser.add_argument("--prefix-cache-bytes", type=int)
    parser.add_argument("--kv-files", type=Path, help="the folder")
    parser.add_argument("--kv-files-bytes", type=int, default=0)
    parser.add_argument("--compute-threads", type=int, required=True)
    parser.add_argument("--are-threads-set", type=int, default=0, help="1: by the user")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    main()
