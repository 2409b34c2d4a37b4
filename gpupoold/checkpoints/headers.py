"""The beginnings of weight files on the hub: shapes and dtypes of tensors without the tensors.

The header of a safetensors file is at the file's beginning, so a checkpoint of 100 GB is checked
after some megabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.hub import Hub, Interrupted, RangeRefused
from gpupoold.checkpoints.manifest import HubFile, Manifest, read_manifest
from gpupoold.checkpoints.tensor_file import MAX_HEADER_BYTES, header_end
from gpupoold.errors import Failed

HEADERS_FOLDER = ".gpupool-headers"
FIRST_RETRY_S = 0.5
_NUM_PARALLEL = 4
_MAX_ATTEMPTS = 5
# Most headers are shorter: about 100 bytes per tensor.
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RemoteWeights:
    """Weight files that are not here: sizes in bytes by name, and a folder with beginnings."""

    folder: Path
    sizes: Mapping[str, int]


def remote_weights(checkpoint: Path) -> RemoteWeights | None:
    """Return the weights that a download without weights left out; None if all are here."""
    manifest = read_manifest(checkpoint)
    if manifest is None or manifest.complete:
        return None
    sizes = {file.path: file.num_bytes for file in _weights(manifest)}
    return RemoteWeights(checkpoint / HEADERS_FOLDER, sizes)


def fetch_headers(hub: Hub, manifest: Manifest, checkpoint: Path, stop: threading.Event) -> None:
    """Fetch the header of each safetensors file of a download. Pickles have no header."""
    folder = checkpoint / HEADERS_FOLDER
    folder.mkdir(exist_ok=True)
    files = [file for file in _weights(manifest) if file.path.endswith(".safetensors")]

    def fetch(file: HubFile) -> None:
        if not stop.is_set():
            start = _beginning(hub, manifest.commit, file, stop)
            (folder / file.path).write_bytes(start)

    with ThreadPoolExecutor(_NUM_PARALLEL, thread_name_prefix="headers") as pool:
        list(pool.map(fetch, files))


def _weights(manifest: Manifest) -> Sequence[HubFile]:
    return [f for f in manifest.files if "/" not in f.path and layout.is_weight_file(f.path)]


def _beginning(hub: Hub, commit: str, file: HubFile, stop: threading.Event) -> bytes:
    start = _read(hub, commit, file, min(_FIRST_BYTES, file.num_bytes), stop)
    end = header_end(start)
    if len(start) < end <= min(MAX_HEADER_BYTES, file.num_bytes):
        start = _read(hub, commit, file, end, stop)
    return start


def _read(hub: Hub, commit: str, file: HubFile, num_bytes: int, stop: threading.Event) -> bytes:
    problem = "the connection closed early"
    for attempt in range(_MAX_ATTEMPTS if num_bytes else 0):
        found = bytearray()
        try:
            with hub.open_file(commit, file.path, 0, num_bytes) as (_, chunks):
                for chunk in chunks:
                    found += chunk
                    if len(found) >= num_bytes or stop.is_set():
                        return bytes(found[:num_bytes])
        except (Interrupted, RangeRefused) as error:
            problem = str(error) or "the hub refuses the range"
        if stop.wait(FIRST_RETRY_S * 2**attempt):
            break
    if num_bytes and not stop.is_set():
        raise Failed(f"reading the beginning of {file.path}: {problem}", "try again later")
    return b""
