"""Draw docs/top.svg: ``gpupool top`` on a daemon with simulated GPUs under load.

``make pictures`` draws this picture and the demo's; this one takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.sim_devices import CappedLengths, send_all, sim_config
from gpupool_tui.app import TopApp
from gpupool_tui.run import ask_once
from gpupool_tui.view import Panel, View
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.presets import SMALL_BOX
from gpupoold.sim.workloads import poisson_workload

SIZE = (148, 40)
BOX = "4xA10"
LOAD_S = 75.0
START_S = 600.0
# Share of the small box's usual load, so that the daemon keeps its targets on a machine whose few
# cores also draw the picture.
LOAD_SHARE = 0.7


def main() -> None:
    """Draw the picture; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/top.svg"))
    path: Path = parser.parse_args().file
    with (
        tempfile.TemporaryDirectory(prefix="gpupool-") as folder,
        private_daemon(sim_config(parse_box(BOX)), Path(folder) / "pool", START_S) as daemon,
    ):
        for one in SMALL_BOX:
            checkpoint = make_dummy_checkpoint(Path(folder), one.shape)
            targets = {"ttft_s": one.targets.ttft_s, "tbt_s": one.targets.tbt_s}
            daemon.add_model(one.name, checkpoint, max_model_len=8192, **targets)
        asyncio.run(_draw(daemon, path))
    print(path)


async def _draw(daemon: PrivateDaemon, path: Path) -> None:
    rates = {one.name: LOAD_SHARE * one.rps for one in SMALL_BOX}
    requests = poisson_workload(rates, LOAD_S, CappedLengths(1024, 256), seed=3)
    load = asyncio.create_task(send_all(daemon.http_url, requests, 3, 1.0))
    await asyncio.sleep(LOAD_S - 5.0)
    with daemon.client() as client:
        picture = ask_once(client)
    view = View()
    view.selected[Panel.MODELS] = "qwen-7b"
    app = TopApp(daemon.socket_path, picture, view)
    async with app.run_test(size=SIZE) as pilot:
        end_s = time.monotonic() + 4.0
        while time.monotonic() < end_s:
            await pilot.pause(0.2)
        app.save_screenshot(path.name, str(path.parent))
    load.cancel()


if __name__ == "__main__":
    main()
