"""The example of a RAG box, as users run it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples.rag.__main__ import QUESTIONS, TINY, passages_of
from examples.rag.pipeline import nearest
from tests.conftest import ROOT
from tests.functional.daemon_tools import child_env


def test_the_nearest_come_first() -> None:
    vectors = [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]
    assert nearest([0.0, 1.0], vectors, 2) == [1, 2]
    assert nearest([1.0, 0.0], vectors, 9) == [0, 2, 1]


def test_passages_are_paragraphs_of_moderate_length() -> None:
    passages = passages_of(ROOT / "docs")
    assert len(passages) == 64
    assert all(80 <= len(one) <= 240 for one in passages)


@pytest.mark.slow
def test_answers_at_once_equal_answers_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.rag"],
        cwd=ROOT,
        env=child_env(shares_import=True) | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    answers = [line for line in rows if line.rstrip("│ ").endswith("yes")]
    assert len(answers) == len(QUESTIONS)
    for name in TINY.names:
        assert any(name in line and "100 %" in line for line in rows), name
    assert "switches on one device" in done.stdout


def test_url_and_models_belong_together() -> None:
    command = [sys.executable, "-m", "examples.rag", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_env(), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "belong together" in done.stderr
