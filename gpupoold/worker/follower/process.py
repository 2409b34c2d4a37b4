"""The main function of a follower's process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from gpupoold.memory.contracts import Device
from gpupoold.memory.group.follower import FollowerMemory
from gpupoold.memory.group.link import RankLost
from gpupoold.memory.group.orders import OrderCount, run_files, run_orders
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
    receivers = (memory, memory.regions, engines)
    links.orders.send(device.num_pages)
    for run in (engines.run_loads, lambda: run_files(links.files, receivers, done)):
        threading.Thread(target=_until_lost, args=(run,), daemon=True).start()
    run_orders(links.orders, receivers, done)


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
