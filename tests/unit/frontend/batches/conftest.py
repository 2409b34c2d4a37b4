"""A store of files and batches, in a temporary folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state.batches import BatchStore
from gpupoold.config.sections import BatchSettings
from gpupoold.frontend.batches.files import StoredFiles


@pytest.fixture
def bounds() -> BatchSettings:
    return BatchSettings(
        max_bytes=100_000,
        max_key_bytes=40_000,
        max_file_bytes=10_000,
        max_requests=100,
        max_live=4,
        keep=3600.0,
        max_key_files=6,
        max_key_batches=5,
    )


@pytest.fixture
def files(tmp_path: Path) -> StoredFiles:
    return StoredFiles(tmp_path / "files")


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[BatchStore]:
    store = await BatchStore.open(tmp_path)
    yield store
    await store.close()
