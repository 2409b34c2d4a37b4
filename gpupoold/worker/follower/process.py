"""The main function of a follower's process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from gpupoold.memory.contracts import Device
from gpupoold.memory.group.follower import FollowerMemory
from gpupoold.memory.group.link import Link, RankLost
from gpupoold.memory.group.orders import OrderCount
from gpupoold.worker.follower.engines import FollowerEngines
from gpupoold.worker.ranks import Rank

_logger = logging.getLogger(__name__)


def follow(rank: Rank, device: Device) -> None:
    """Carry out the leader's orders until the leader ends.

    Raises:
        RankLost: the leader has ended.
        Exception: an order failed; the group cannot go on.
    """
    done = OrderCount()
    [links] = rank.links
    memory = FollowerMemory(device, rank.rank, done)
    engines = FollowerEngines(device, memory, links.loads, rank.rank, done)
    links.orders.send(device.num_pages)
    for run in (engines.run_loads, lambda: _serve_files(links.files, memory, engines, done)):
        threading.Thread(target=_until_lost, args=(run,), daemon=True).start()
    methods: dict[str, Callable[..., None]] = {}
    while True:
        (method, arguments), fds = links.orders.receive()
        if method not in methods:
            methods[method] = getattr(memory, method, None) or getattr(engines, method)
        methods[method](*arguments, *fds)
        done.add()


def _serve_files(
    link: Link, memory: FollowerMemory, engines: FollowerEngines, done: OrderCount
) -> None:
    """Map, pin and free host memory, and read adapters, for the leader's threads."""
    answered: dict[str, Callable[..., None]] = {
        "map_host": memory.map_host,
        "read_adapter": engines.read_adapter,
    }
    while True:
        (num_orders, method, arguments), fds = link.receive()
        done.wait_for(num_orders)
        if method not in answered:
            memory.close_region(*arguments)
            continue
        try:
            answered[method](*arguments, *fds)
            link.send("")
        except Exception as error:
            _logger.exception("%s failed", method)
            link.send(str(error) or type(error).__name__)


def _until_lost(run: Callable[[], Any]) -> None:
    """Run a thread; end the process after an error, as the main thread does."""
    try:
        run()
    except RankLost:
        os._exit(0)
    except BaseException:
        _logger.exception("a thread of the follower ends")
        logging.shutdown()
        os._exit(1)
