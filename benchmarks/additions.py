"""Time to add many models to several devices: side by side, beside one after the other.

Both runs add the same random checkpoint under new names to a daemon with emulated devices, and end
when every device hosts every model:

    python -m benchmarks.additions --models 20 --devices 2 --size 3000000

The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench.rig import emulated_config, make_checkpoints
from benchmarks.private_daemon import PrivateDaemon, private_daemon

_MAX_MODEL_LEN = 256
_DEVICE_BYTES = 64 << 20
_POLL_S = 0.05
_START_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=3_000_000, help="bytes of weights")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpupool-additions-") as folder:
        [checkpoint] = make_checkpoints(Path(folder), ["llama"], arguments.size)
        result = run_additions(checkpoint, arguments.models, arguments.devices, arguments.rounds)
    print(json.dumps(result))


def run_additions(
    checkpoint: Path, num_models: int, num_devices: int, rounds: int
) -> dict[str, Any]:
    """Return the seconds until the first and until all additions have ended, and the memory of an
    engine outside the pages.

    The runs alternate, and the round with the shortest time counts for each kind.

    Raises:
        GpupoolError: a model could not be added.
    """
    names = [f"model-{number}" for number in range(num_models)]
    kinds = {"one_after_the_other": 1, "side_by_side": num_models}
    runs = [
        {kind: _run(checkpoint, names, num_devices, at_once) for kind, at_once in kinds.items()}
        for _ in range(rounds)
    ]
    return {
        "models": num_models,
        "devices": num_devices,
        **{kind: min((run[kind] for run in runs), key=lambda one: one["all_s"]) for kind in kinds},
        "rounds": runs,
    }


def _run(
    checkpoint: Path, names: Sequence[str], num_devices: int, num_at_once: int
) -> dict[str, float]:
    with private_daemon(emulated_config(_DEVICE_BYTES, num_devices)) as daemon:
        _until_devices_ready(daemon)
        began_s = time.monotonic()

        def add(name: str) -> float:
            daemon.add_model(name, checkpoint, max_model_len=_MAX_MODEL_LEN)
            return time.monotonic() - began_s

        with ThreadPoolExecutor(num_at_once) as threads:
            done_s = list(threads.map(add, names))
        with daemon.client() as client:
            models = client.ps().models
    lacking = [one.name for one in models if len(one.engines) < num_devices]
    assert not lacking, f"not on all devices: {lacking}"
    sizes = [engine.device_bytes for one in models for engine in one.engines]
    return {
        "all_s": max(done_s),
        "first_s": min(done_s),
        "engine_bytes_p50": median(sizes),
        "engine_bytes_max": max(sizes),
    }


def _until_devices_ready(daemon: PrivateDaemon) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    with daemon.client() as client:
        while not all(one.state == "ready" for one in client.ps().devices):
            assert time.monotonic() < deadline_s, "the devices did not start"
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
