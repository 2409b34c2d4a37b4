"""`make demo`: four models on one small GPU; then two GPUs, and one fails. Every answer is checked.

Makes four tiny checkpoints and starts a daemon with two emulated devices; a device has memory for
the weights of 1.5 models. On a machine with GPUs the daemon uses the GPUs instead.

Act one uses the first device only: 32 chat requests at once over the four models, with the
official OpenAI client. Act two uses both devices, and kills the process of a device in the middle
of answers. Every answer is compared with the undisturbed answer; any differing token is a failure.

The picture in the README: `make pictures`, on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from gpupoold.system.interrupts import INTERRUPTED, ended_by_interrupts

with ended_by_interrupts():
    from rich.console import Console

    from benchmarks.private_daemon import PrivateDaemon, private_daemon
    from examples.demo import act_one, act_two
    from examples.demo.setting import (
        BUILD,
        add_models,
        daemon_config,
        device_text,
        gpupool,
        make_models,
        set_aside,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--svg", type=Path, help="also save what was printed as a picture")
    picture: Path | None = parser.parse_args().svg
    console = Console(record=picture is not None, width=88 if picture else None, highlight=False)
    try:
        is_good = run(console)
    except KeyboardInterrupt:
        console.print("Interrupted; everything has been stopped.")
        return INTERRUPTED
    if picture is not None:
        console.save_svg(str(picture), title="make demo")
    return 0 if is_good else 1


def run(console: Console) -> bool:
    folder = BUILD / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    models = make_models(console)
    console.print(f"[bold]2.[/] start gpupoold: {device_text()}")
    with private_daemon(daemon_config(), folder) as daemon:
        set_aside(console, daemon)
        add_models(console, daemon, models)
        first = asyncio.run(act_one.play(console, daemon, list(models)))
        is_good = act_one.report(console, first)
        second = asyncio.run(act_two.play(console, daemon, list(models)))
        is_good &= act_two.report(console, second)
        explain(console, daemon, second["hit"][:1])
    save({"act_one": first, "act_two": second})
    console.print("The figures are in build/demo.json.")
    return is_good


def explain(console: Console, daemon: PrivateDaemon, stream_ids: list[str]) -> None:
    """Show what the daemon says of answers by the ids that their clients have."""
    for stream_id in stream_ids:
        console.print(f"[bold]8.[/] one of the interrupted answers: gpupool why {stream_id}")
        console.print(gpupool(["why", stream_id], daemon), markup=False, style="dim")


def save(result: dict[str, Any]) -> None:
    (BUILD / "demo.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
