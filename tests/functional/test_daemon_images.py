"""A daemon that starts again takes weights from its saved images, if they are sound."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpupool_cli.private_daemon import PrivateDaemon, private_daemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    api_client,
    ask,
    cli,
    device_config,
    ps,
    until,
)


async def test_images_outlive_the_daemon(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_models[LLAMA], checkpoint)
    [weights] = checkpoint.glob("*.safetensors")
    original, times = weights.read_bytes(), weights.stat()
    config = device_config(device_bytes) + '[memory]\nimage_files = "1GiB"\n'
    folder = tmp_path / "daemon"

    def set_weights(data: bytes) -> None:
        weights.write_bytes(data)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    def images() -> list[Path]:
        return list((folder / "state" / "images").glob("*.image"))

    async def first_answer(daemon: PrivateDaemon) -> list[int]:
        until(lambda: [row.state for row in ps(daemon).models] == ["ready"], 60)
        async with api_client(daemon.http_url) as api:
            return (await ask(api, LLAMA, "Where do the weights come from?")).token_ids

    with private_daemon(config, folder) as daemon:
        daemon.add_model(LLAMA, checkpoint, **LOAD_OPTIONS)
        expected = await first_answer(daemon)
        until(lambda: len(images()) == 1, 60)

    set_weights(b"\x3c" * len(original))  # nobody is to read them
    with private_daemon(config, folder) as daemon:
        assert await first_answer(daemon) == expected

    set_weights(original)
    [image] = images()
    saved = image.read_bytes()
    middle = len(saved) // 2
    image.write_bytes(saved[:middle] + bytes([saved[middle] ^ 1]) + saved[middle + 1 :])
    with private_daemon(config, folder) as daemon:
        assert await first_answer(daemon) == expected
        until(lambda: [image.read_bytes() for image in images()] == [saved], 60)
        assert cli(daemon, "rm", LLAMA).returncode == 0
        assert images() == []
