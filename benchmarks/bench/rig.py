"""Random checkpoints and devices of fixed sizes for the benchmarks' private daemons."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpupoold.config.schema import default_devices
from gpupoold.config.sections import CUDA_RESERVE_BYTES
from gpupoold.errors import Failed

# The smallest pages of a GPU, for small models whose KV may begin with a page for each layer:
# two models with up to 32 layers, and the same amount for growth.
_CUDA_PAGE_BYTES = 2 << 20
_CUDA_CHUNKS_BYTES = 4 * 32 * _CUDA_PAGE_BYTES


def make_checkpoints(
    folder: Path, architectures: list[str], size_bytes: int, num_gpus: int = 1
) -> list[Path]:
    """Make random checkpoints, one per architecture, in another process (which needs torch).

    Groups of ``num_gpus`` can divide the checkpoints.

    Raises:
        Failed: the message has the maker's last words.
    """
    for architecture in architectures:
        command = [sys.executable, "-m", "gpupoold.checkpoints.tiny", str(folder)]
        command += ["--arch", architecture, "--size", str(size_bytes), "--gpus", str(num_gpus)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise Failed(f"the {architecture} checkpoint could not be made: {last[0]}")
    return [folder / f"tiny-{architecture}" for architecture in architectures]


def device_config(num_bytes: int, num_gpus: int = 1) -> str:
    """Return TOML for one device with ``num_bytes`` for models: the first GPUs, or emulated."""
    if default_devices()[0]["kind"] != "cuda":
        return emulated_config(num_bytes, num_gpus=num_gpus)
    memory = -(-num_bytes // num_gpus) + CUDA_RESERVE_BYTES + _CUDA_CHUNKS_BYTES
    group = f"gpus = {list(range(num_gpus))}\n" if num_gpus > 1 else ""
    sizes = f"memory = {memory}\npage_bytes = {_CUDA_PAGE_BYTES}\n"
    return f'[[device]]\nkind = "cuda"\n{group}{sizes}'


def emulated_config(num_bytes: int, num_devices: int = 1, num_gpus: int = 1, link: str = "") -> str:
    """TOML of emulated devices of ``num_gpus`` with ``num_bytes`` each, also where there are GPUs.

    The GPUs of a group share the bytes. ``link`` is the bandwidth of a modelled link.
    """
    device = f'[[device]]\nkind = "emulated"\nmemory = {-(-num_bytes // num_gpus)}\n'
    device += f"gpus = {num_gpus}\n" * (num_gpus > 1) + f'link = "{link}"\n' * bool(link)
    return device * num_devices


def weight_bytes(checkpoint: Path) -> int:
    """Bytes of a checkpoint's weight files."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
