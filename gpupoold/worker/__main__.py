"""``python -m gpupoold.worker``: the process that the daemon starts for each device."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from typing import NoReturn

from gpupoold.engine_versions import check_engine_version
from gpupoold.errors import Failed
from gpupoold.system.activity import WORKER
from gpupoold.system.process import (
    EMULATED_DEVICE_NICENESS,
    OUT_OF_MEMORY_STATUS,
    WORKER_OOM_SCORE_ADJ,
    begin_child,
    end_at_faults,
    importing,
    lower_priority,
    raise_oom_score,
)
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import ToWorker, WorkerReady
from gpupoold.worker.environment import set_engine_environment
from gpupoold.worker.out_of_memory import is_out_of_memory

_logger = logging.getLogger("gpupoold.worker")

# How long a copying thread waits for the GIL between two pieces while another thread runs Python
# code. Copies in pieces of 1 MiB, 6.0 GB/s alone, then reach 0.2 GB/s with the default of 5 ms,
# 1.3 GB/s with 0.5 ms and 2.5 GB/s with 0.1 ms. The other thread was equally fast with each value.
_SWITCH_INTERVAL_S = 0.0001


def main() -> None:
    """Serve with one device until ``Shutdown`` arrives or the daemon ends."""
    arguments = _parse()
    begin_child("worker", arguments.log_level, arguments.parent_pid)
    raise_oom_score(WORKER_OOM_SCORE_ADJ)
    if arguments.device_kind == "emulated":
        lower_priority(EMULATED_DEVICE_NICENESS)
    if arguments.activity_fd is not None:
        WORKER.attach(arguments.activity_fd)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.compute_threads))
    set_engine_environment(arguments.log_level)
    if arguments.device_kind == "cuda":
        _show_one_gpu(arguments.device_index)
    channel: BlockingChannel[ToWorker] = BlockingChannel(
        socket.socket(fileno=arguments.wire_fd), ToWorker
    )
    try:
        _serve(arguments, channel)
    except ChannelClosed as closed:
        _logger.info("the daemon has closed the connection (%s); exiting", closed)
    except Exception as error:
        _leave_if_out_of_memory(error)
        _logger.exception("the worker ends")
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End the process at once.

    A normal exit would spend seconds on engines whose memory the kernel frees anyway, and wait for
    a load beside the turns.
    """
    logging.shutdown()
    os._exit(status)


def _leave_if_out_of_memory(error: Exception) -> None:
    if not is_out_of_memory(error):
        return
    try:
        _logger.exception("out of memory")
        logging.shutdown()
    finally:
        os._exit(OUT_OF_MEMORY_STATUS)  # also if there was no memory for logging


def _serve(arguments: argparse.Namespace, channel: BlockingChannel[ToWorker]) -> None:
    with importing():
        from gpupoold.worker.calls import answer
        from gpupoold.worker.device import device_name, open_device
        from gpupoold.worker.kv.residency import Residency
        from gpupoold.worker.turns.loop import TurnLoop
    end_at_faults()
    from gpupoold.memory.bandwidth import measure_fill, measure_link
    from gpupoold.memory.host import KvHostCache
    from gpupoold.memory.numa import prefer_node
    from gpupoold.memory.pages import PagePool

    version = check_engine_version()
    if arguments.device_kind == "emulated":
        with importing():
            from gpupoold.worker.engine.cpu_build import adapt_cpu_build
        adapt_cpu_build()
    device = open_device(
        arguments.device_kind,
        arguments.device_bytes,
        arguments.reserve_bytes,
        arguments.page_bytes,
        arguments.link_bytes_per_s,
    )
    pool = PagePool(device.num_pages, device.table_pages)
    host = KvHostCache(arguments.kv_host_bytes)
    with prefer_node(device.numa_node):
        host.pin(device)
        link = measure_link(device, pool)
        bandwidth = measure_fill(device, pool)
    loop = TurnLoop(
        arguments.device,
        device,
        host,
        lambda use_of: Residency(device, pool, host, bandwidth, use_of, arguments.device),
        channel,
        answer,
        arguments.self_check_interval,
        has_gpu_alone=arguments.num_sharing == 1,
    )
    channel.send(
        WorkerReady(
            arguments.device,
            os.getpid(),
            device.num_pages * device.page_bytes,
            device.page_bytes,
            bandwidth,
            version,
            device_name(arguments.device_kind),
            arguments.kv_host_bytes,
            link.in_bytes_per_s,
            link.out_bytes_per_s,
            shares_kv_host=bool(host.budget_bytes),
            reserve_free_bytes=device.free_bytes(),
        ),
        (host.fd,) if host.budget_bytes else (),
    )
    loop.run()


def _show_one_gpu(index: int) -> None:
    """Hide all GPUs except the ``index``-th visible one; to be called before importing vLLM and
    torch.

    vLLM puts an engine of one rank on the first visible GPU, and a hidden GPU cannot get a context
    by accident.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        chosen = str(index)
    else:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
        if index >= len(entries):
            raise Failed(
                f"there is no CUDA device {index}: CUDA_VISIBLE_DEVICES is {visible!r}",
                "change the variable, or the device's index in the configuration",
            )
        chosen = entries[index]
    os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # indices as in nvidia-smi


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpupoold.worker")
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--activity-fd", type=int, help="see gpupoold.system.activity")
    parser.add_argument("--device-kind", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--num-sharing", type=int, default=1, help="workers on the GPU")
    parser.add_argument("--device-bytes", type=int, required=True, help="0: all but the reserve")
    parser.add_argument("--reserve-bytes", type=int, default=0)
    parser.add_argument("--page-bytes", type=int, default=0)
    parser.add_argument("--link-bytes-per-s", type=int, default=0, help="of an emulated device")
    parser.add_argument("--kv-host-bytes", type=int, required=True)
    parser.add_argument("--compute-threads", type=int, required=True)
    parser.add_argument("--self-check-interval", type=int, default=0, help="0: no self-check")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    main()
