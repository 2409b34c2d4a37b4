"""Checkpoints that are on this machine already, although a Hugging Face id was given."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpupoold.checkpoints.download import checkpoint_dir
from gpupoold.checkpoints.hub import Hub
from gpupoold.checkpoints.hub_cache import FoundSnapshot, find_snapshot
from gpupoold.checkpoints.manifest import read_manifest
from gpupoold.checkpoints.resolve import HubSource
from gpupoold.checkpoints.selection import Content
from gpupoold.config.schema import Settings


def folder_of(found: HubSource, revision: str | None, settings: Settings) -> Path:
    """Return the folder for the download of a repository."""
    return checkpoint_dir(settings.paths.download_dir, found.repo_id, revision)


async def cached(
    found: HubSource, revision: str | None, settings: Settings, content: Content = "checkpoint"
) -> FoundSnapshot:
    """Return the snapshot in a shared Hugging Face cache; none after an own complete download."""
    manifest = read_manifest(folder_of(found, revision, settings))
    if manifest is not None and manifest.complete:
        return FoundSnapshot(None)
    return await asyncio.to_thread(
        find_snapshot,
        Hub(found.repo_id, settings.paths.model_dirs),
        revision,
        settings.paths.hf_cache,
        content,
        allow_pickle=settings.security.allow_pickle,
        allow_remote_code=settings.security.allow_remote_code,
    )
