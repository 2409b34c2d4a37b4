"""``python -m gpupoold.simdevice``: the worker process of a simulated device."""

from __future__ import annotations

import argparse
import logging
import socket

from gpupoold import __version__
from gpupoold.domain import DeviceFacts
from gpupoold.latency.shape import hardware
from gpupoold.sim.boxes import Box
from gpupoold.simdevice.server import PAGE_BYTES, SimServer
from gpupoold.system.activity import WORKER
from gpupoold.system.process import WORKER_OOM_SCORE_ADJ, begin_child, raise_oom_score
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import ToWorker, WorkerReady

_logger = logging.getLogger("gpupoold.simdevice")


def main() -> None:
    """Simulate the device until the daemon sends ``Shutdown`` or is gone."""
    arguments = _parse()
    begin_child("simdevice", arguments.log_level, arguments.parent_pid)
    raise_oom_score(WORKER_OOM_SCORE_ADJ)
    if arguments.activity_fd is not None:
        WORKER.attach(arguments.activity_fd)
    wire = socket.socket(fileno=arguments.wire_fd)
    channel: BlockingChannel[ToWorker] = BlockingChannel(wire, ToWorker)
    try:
        _serve(arguments, channel)
    except ChannelClosed:
        _logger.info("the daemon has closed the connection, exiting")


def _serve(arguments: argparse.Namespace, channel: BlockingChannel[ToWorker]) -> None:
    gpu, num_gpus = hardware(arguments.gpu), arguments.num_gpus
    gpu_bytes = arguments.device_bytes or Box(1, gpu.name).device_bytes
    device_bytes = num_gpus * gpu_bytes
    host_bytes = arguments.kv_host_bytes
    host_bytes = None if host_bytes is None else num_gpus * host_bytes
    server = SimServer(arguments.device, gpu.name, device_bytes, channel, num_gpus, host_bytes)
    channel.send(
        WorkerReady(
            DeviceFacts(
                device_bytes,
                PAGE_BYTES,
                num_gpus * gpu.pcie_bandwidth_bytes_per_s,
                kv_host_limit_bytes=host_bytes,
            ),
            f"sim {__version__}",
            f"sim:{gpu.name}" if num_gpus == 1 else f"sim:{num_gpus}x{gpu.name}",
        )
    )
    server.run()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpupoold.simdevice")
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--activity-fd", type=int, help="see gpupoold.system.activity")
    parser.add_argument("--gpu", required=True, help="a name of latency/hardware.toml")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs of a group")
    parser.add_argument(
        "--device-bytes", type=int, default=0, help="of a GPU; default: 90 %% of its memory"
    )
    parser.add_argument(
        "--kv-host-bytes", type=int, help="host memory for KV, for each GPU; default: no limit"
    )
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


if __name__ == "__main__":
    main()
