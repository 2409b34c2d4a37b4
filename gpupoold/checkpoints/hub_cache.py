"""Snapshots in a shared Hugging Face cache, which other programs have downloaded.

A complete snapshot of the asked revision is used in place: nothing is downloaded or copied, and
nothing is written to the cache. The layout of the cache is the hub library's matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.fetcher import has_size
from gpupoold.checkpoints.hub import Hub, HubFile
from gpupoold.checkpoints.layout import Content, Wanted
from gpupoold.errors import GpupoolError
from gpupoold.files import hint_to_read

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}")
_MAX_REF_BYTES = 200
_NUM_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """The result of a search in the caches: a complete snapshot, or None; and a note for users."""

    path: Path | None
    note: str = ""


def find_snapshot(
    hub: Hub, revision: str | None, caches: Sequence[Path] | None, wanted: Wanted
) -> FoundSnapshot:
    """Look for a revision of a repository in cache folders; None means the library's own folder.

    Complete are snapshots with all files that a download would fetch, in their sizes, by the
    listing in the cache, else the hub's. If neither can be read, the checks of the checkpoint
    decide. Blocks on file access and on the hub.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    notes: list[str] = []
    for cache in (Path(HF_HUB_CACHE),) if caches is None else caches:
        snapshot = _snapshot(hub.repo_id, revision, cache, wanted.content)
        if snapshot is not None:
            problem = _problem(hub, cache, snapshot, wanted)
            if not problem:
                return FoundSnapshot(snapshot, f"used in place, without a download: {snapshot}")
            notes.append(f"not used: {snapshot}: {problem}")
        elif caches is not None and not os.access(cache, os.R_OK | os.X_OK):
            notes.append(f"not used: {cache}: {hint_to_read(cache) or 'no such folder'}")
    return FoundSnapshot(None, "; ".join(notes))


def _snapshot(repo_id: str, revision: str | None, cache: Path, content: Content) -> Path | None:
    """Return the folder of a revision's snapshot, which may be incomplete."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    name = revision or "main"
    if not _REVISION.fullmatch(name) or ".." in name:
        return None
    config = layout.ADAPTER_CONFIG_FILE if content == "adapter" else layout.CONFIG_FILE
    try:
        ref = cache / repo_folder_name(repo_id=repo_id, repo_type="model") / "refs" / name
        if os.path.isfile(ref) and ref.stat().st_size > _MAX_REF_BYTES:
            return None
        found = try_to_load_from_cache(repo_id, config, cache_dir=cache, revision=name)
    except (OSError, ValueError):  # no access; a reference that is no text
        return None
    return Path(found).parent if isinstance(found, str) else None


def _problem(hub: Hub, cache: Path, snapshot: Path, wanted: Wanted) -> str:
    """Say why a snapshot cannot be used; empty if the snapshot is complete."""
    listed = _listing(hub, cache, snapshot)
    try:
        chosen = wanted.choose(hub.repo_id, [file.path for file in listed])
    except GpupoolError as error:
        return error.message
    files = [file for file in listed if file.path in chosen]
    repository = os.path.realpath(snapshot.parent.parent)
    for file in files:
        real = os.path.realpath(snapshot / file.path)
        if os.path.commonpath([real, repository]) != repository:
            return f"{file.path} is a link that leaves the repository's folder"
    lacking = [file.path for file in files if not _is_whole(snapshot / file.path, file.num_bytes)]
    if lacking:
        more = f" and {n} more" if (n := len(lacking) - _NUM_NAMES_SHOWN) > 0 else ""
        return f"incomplete or unreadable: {', '.join(lacking[:_NUM_NAMES_SHOWN])}{more}"
    return ""


def _listing(hub: Hub, cache: Path, snapshot: Path) -> Sequence[HubFile]:
    """Return the files of a snapshot's commit; a size of -1 is unknown.

    Without a listing in the cache or from the hub these are the files that are there.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(hub.repo_id, revision=snapshot.name, cache_dir=cache)
        return [HubFile(file.path, int(file.size), "") for file in tree]
    except (CachedRepoTreeNotFoundError, OSError):
        pass
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass  # a listing that the library did not write
    try:
        return hub.list_files(snapshot.name)[1]
    except GpupoolError:
        present = (path for path in snapshot.rglob("*") if not path.is_dir())
        return [HubFile(str(path.relative_to(snapshot)), -1, "") for path in present]


def _is_whole(path: Path, num_bytes: int) -> bool:
    is_there = has_size(path, num_bytes) if num_bytes >= 0 else os.path.isfile(path)
    return is_there and os.access(path, os.R_OK)
