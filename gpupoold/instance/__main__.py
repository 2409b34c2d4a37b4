"""``python -m gpupoold.instance``: started by the daemon, one per device."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys

from gpupoold.process import die_with_parent
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import InstanceReady, ToInstance

_logger = logging.getLogger("gpupoold.instance")


def main() -> None:
    """Own the device until the daemon says stop or is gone."""
    arguments = _parse()
    die_with_parent(arguments.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s instance %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _prepare_environment(arguments.log_level, arguments.compute_threads)
    channel: BlockingChannel[ToInstance] = BlockingChannel(
        socket.socket(fileno=arguments.wire_fd), ToInstance
    )
    try:
        _serve(arguments, channel)
    except ChannelClosed:
        _logger.info("the daemon is gone, leaving")
    logging.shutdown()
    # An ordinary exit would spend seconds tearing down engines whose memory goes anyway.
    os._exit(0)


def _serve(arguments: argparse.Namespace, channel: BlockingChannel[ToInstance]) -> None:
    from gpupoold.instance import engine
    from gpupoold.instance.residency import Residency, measure_bandwidth
    from gpupoold.instance.turn_loop import TurnLoop
    from gpupoold.memory.emulated import EmulatedDevice
    from gpupoold.memory.host import KvHostCache
    from gpupoold.memory.pages import PagePool
    from gpupoold.scheduling.turns import TurnScheduler

    version = engine.check_engine_version()
    engine.use_plain_linear_layers()
    device = EmulatedDevice(arguments.device_bytes, arguments.page_bytes or None)
    pool = PagePool(device.num_pages)
    host = KvHostCache(arguments.kv_host_bytes, device.page_bytes)
    bandwidth = measure_bandwidth(device, pool)
    loop = TurnLoop(
        arguments.instance,
        device,
        host,
        lambda use_of: Residency(device, pool, host, bandwidth, use_of),
        TurnScheduler(arguments.quota_max_s),
        channel,
    )
    channel.send(
        InstanceReady(
            arguments.instance,
            os.getpid(),
            device.num_pages * device.page_bytes,
            device.page_bytes,
            bandwidth,
            version,
        )
    )
    loop.run()


def _prepare_environment(log_level: str, compute_threads: int) -> None:
    """What vLLM and torch read from the environment when they are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(compute_threads))
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=log_level.upper(),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpupoold.instance")
    parser.add_argument("--instance", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--device-kind", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--device-bytes", type=int, required=True, help="0: all but the reserve")
    parser.add_argument("--reserve-bytes", type=int, default=0)
    parser.add_argument("--page-bytes", type=int, default=0)
    parser.add_argument("--kv-host-bytes", type=int, required=True)
    parser.add_argument("--quota-max-s", type=float, required=True)
    parser.add_argument("--compute-threads", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    main()
