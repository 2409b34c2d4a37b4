"""The pages in docs/reference are what scripts/reference.py makes of the code."""

from __future__ import annotations

import pytest

from scripts.reference import FOLDER, pages

MADE = pages()


@pytest.mark.parametrize("name", MADE)
def test_the_page_is_up_to_date(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == MADE[name], "run `make reference`"


def test_every_setting_has_a_meaning() -> None:
    assert "|  |" not in MADE["settings.md"]


def test_there_are_no_other_pages() -> None:
    assert {path.name for path in FOLDER.iterdir()} == MADE.keys()
