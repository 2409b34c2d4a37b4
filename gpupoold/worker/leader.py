"""The start of a group's leader: the device and the links to the followers' loads."""

from __future__ import annotations

from gpupoold.memory.contracts import Device
from gpupoold.memory.group.device import GroupDevice
from gpupoold.memory.group.orders import OrderBook
from gpupoold.worker.ranks import Rank
from gpupoold.worker.weights.rank_loads import LoadLinks


def lead(rank: Rank, own: Device) -> tuple[Device, LoadLinks]:
    """Return the group's device, whose pages all ranks have, when all ranks are ready.

    Raises:
        RankLost: a follower has ended.
    """
    num_pages = [own.num_pages, *(links.orders.receive()[0] for links in rank.links)]
    orders = OrderBook([links.orders for links in rank.links])
    device = GroupDevice(own, orders, [links.files for links in rank.links], min(num_pages))
    return device, LoadLinks([links.loads for links in rank.links], orders)
