"""Progress in words."""

from __future__ import annotations

import pytest

from gpupoold.api.schemas_models import (
    Progress,
    amount_text,
    load_text,
    speed_text,
    stage_text,
)
from gpupoold.durations import LoadStages

GIB = 2**30


def download(done: int | None, total: int | None, rate: float | None = None) -> Progress:
    return Progress(stage="download", done_bytes=done, total_bytes=total, bytes_per_s=rate)


@pytest.mark.parametrize(
    ("progress", "stage", "amount"),
    [
        (Progress(stage="resolve"), "finding the checkpoint", ""),
        (Progress(stage="new-stage"), "new-stage", ""),
        (download(0, 0), "downloading", ""),
        (download(None, 4 * GIB), "downloading 4 GiB", ""),
        (download(GIB, 4 * GIB), "downloading 4 GiB", "1 GiB of 4 GiB, 25 %"),
        (
            download(GIB, 4 * GIB, 64 * 2**20),
            "downloading 4 GiB",
            "1 GiB of 4 GiB, 25 %, 64 MiB/s, 48s left",
        ),
        (download(4 * GIB, 4 * GIB, 1.0), "downloading 4 GiB", "4 GiB of 4 GiB, 100 %"),
    ],
)
def test_words(progress: Progress, stage: str, amount: str) -> None:
    assert (stage_text(progress), amount_text(progress)) == (stage, amount)


def test_stages_of_a_load_are_shown_from_50_ms_on() -> None:
    assert load_text(LoadStages(build_s=0.04)) == "40ms"
    assert load_text(LoadStages(build_s=0.06, read_s=2)) == "2.06s: build 0.1, read 2.0"


def test_less_than_a_second_is_a_second() -> None:
    assert speed_text(download(1, 2, 1e9)) == "954 MiB/s, 1s left"
