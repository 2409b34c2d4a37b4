"""A daemon that starts again: weights from saved snapshots, if they are sound; pins are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    QWEN3,
    Answer,
    api_client,
    ask,
    check,
    cli,
    emulated_config,
    private_daemon,
    ps,
    until,
    weight_bytes,
)

MODELS = (LLAMA, QWEN2, QWEN3)
PROMPT = "Where do the weights come from?"


async def answers(daemon: PrivateDaemon, *models: str) -> dict[str, Answer]:
    """Each model's answer, asked in this order."""
    async with api_client(daemon.http_url) as api:
        return {name: await ask(api, name, PROMPT) for name in models}


def spoil(checkpoint: Path) -> None:
    """Overwrite the weights so that nothing but their bytes tells."""
    [weights] = checkpoint.glob("*.safetensors")
    times = weights.stat()
    weights.write_bytes(b"\x3c" * times.st_size)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))


def damage(snapshot: Path) -> bytes:
    """Flip a bit in the middle; returns what the file was."""
    saved = snapshot.read_bytes()
    middle = len(saved) // 2
    snapshot.write_bytes(saved[:middle] + bytes([saved[middle] ^ 1]) + saved[middle + 1 :])
    return saved


@pytest.mark.slow
async def test_snapshots_and_pins_outlive_the_daemon(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path: Path
) -> None:
    checkpoints = {name: tmp_path / name for name in MODELS}
    for name, path in checkpoints.items():
        shutil.copytree(tiny_models[name], path)
    cache_bytes = int(2.5 * max(weight_bytes(path) for path in checkpoints.values()))
    memory = f'[memory]\nmodel_cache = {cache_bytes}\nsnapshot_files = "1GiB"\n'
    config, folder = emulated_config(device_bytes) + memory, tmp_path / "daemon"

    def snapshot_files() -> set[Path]:
        return set((folder / "state" / "snapshots").glob("*.snapshot"))

    saved_as: dict[str, Path] = {}
    with private_daemon(config, folder) as daemon:
        for name, path in checkpoints.items():
            daemon.add_model(name, path, **LOAD_OPTIONS)
            until(lambda: len(snapshot_files()) > len(saved_as), 60)
            [saved_as[name]] = snapshot_files() - set(saved_as.values())
        expected = await answers(daemon, LLAMA, QWEN3, QWEN2)
        assert cli(daemon, "cache", "pin", LLAMA).returncode == 0

    spoil(checkpoints[LLAMA])  # nobody is to read it
    saved = damage(saved_as[QWEN2])
    with private_daemon(config, folder) as daemon:
        until(lambda: {row.state for row in ps(daemon).models} == {"ready"}, 60)
        with daemon.client() as client:
            cached = {row.name: row for row in client.cache().models}
        # The one that is pinned, and the one that was used last.
        assert {name for name, row in cached.items() if row.state == "host"} == {LLAMA, QWEN2}
        assert [cached[name].is_pinned for name in MODELS] == [True, False, False]
        assert await answers(daemon, *MODELS) == expected
        until(lambda: saved_as[QWEN2].exists() and saved_as[QWEN2].read_bytes() == saved, 60)
        check(daemon)
        assert cli(daemon, "rm", LLAMA).returncode == 0
        assert snapshot_files() == {saved_as[QWEN2], saved_as[QWEN3]}
