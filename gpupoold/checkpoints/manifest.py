"""The state of a download in the target folder: the manifest, and headers of weights to come.

An interrupted download continues with its first commit, so no checkpoint mixes two commits. A
finished download is used unchanged, with or without a network.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.files import MAX_HEADER_BYTES, header_end, read_json
from gpupoold.checkpoints.hub import Hub, HubFile, Interrupted, RangeRefused
from gpupoold.errors import Failed, Refused
from gpupoold.files import replace_durably

MANIFEST_FILE = ".gpupool-download.json"

HEADERS_FOLDER = ".gpupool-headers"
FIRST_RETRY_S = 0.5
_NUM_PARALLEL = 4
_MAX_ATTEMPTS = 5
# Most headers are shorter: about 100 bytes per tensor.
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Manifest:
    """A download's goal and state.

    ``revision`` is as requested, None for the default branch; ``commit`` is the revision's commit.
    """

    repo_id: str
    revision: str | None
    commit: str
    files: tuple[HubFile, ...]
    complete: bool = False


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in ``folder``; None without a readable manifest."""
    try:
        raw = read_json(folder / MANIFEST_FILE)
        files = tuple(HubFile(**file) for file in raw.pop("files"))
        return Manifest(**raw, files=files)
    except (Refused, TypeError, KeyError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in ``folder`` atomically, even across a power failure.

    Raises OSError: the folder cannot be written to.
    """
    draft = folder / f"{MANIFEST_FILE}.new"
    draft.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    replace_durably(draft, folder / MANIFEST_FILE)


def require_complete(folder: Path) -> None:
    """Check that ``folder`` has no unfinished download.

    Raises Refused: the download is unfinished; the hint has the repository.
    """
    manifest = read_manifest(folder)
    if manifest is not None and not manifest.complete:
        raise Refused(
            f"{folder}: the download of {manifest.repo_id} did not finish",
            f"add the model again with --source {manifest.repo_id} to continue the download",
        )


@dataclass(frozen=True, slots=True)
class RemoteWeights:
    """Weight files that are not here: sizes in bytes by name, and a folder with beginnings.

    The header of a safetensors file is at the file's beginning, so a checkpoint of 100 GB is
    checked after some megabytes.
    """

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
