"""A checkpoint as files, and a hub to fetch it from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpupoold.checkpoints import fetcher
from tests.unit.checkpoints.fake_hub import FakeHub, run_hub


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may be asked, whatever a test with an engine did to this process before."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # Read once when the library is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "FIRST_RETRY_S", 0.001)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running hub that the environment points at, without a token."""
    with run_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
